"""The explorer: one page on this machine that shows a plan, lets a user change it, and simulates every change.

- `state`: what the page's controls say: the decisions of a plan, and changes of the cluster.
- `session`: the profiles and the cluster of one page; simulates states, plans, exports.
- `answers`: a timeline, memory and idle times as the JSON that the page draws.
- `search`: a plan searched in the background.
- `server`: HTTP on the loopback interface.
- `page/`: the page itself, plain HTML, CSS and JavaScript; `document` puts it together.
"""
