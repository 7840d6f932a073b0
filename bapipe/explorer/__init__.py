"""The explorer: one page that shows a plan, lets a user change it, and simulates every change.

- `state`: what the page's controls say: the decisions of a plan, and changes of the cluster.
- `session`: the profiles and the cluster of one page; simulates states, plans, exports.
- `answers`: a timeline, memory and idle times as the JSON that the page draws.
- `background`, `analyses`: one long computation at a time: the best plan, the front, what-if curves, an explanation.
- `vary`: the best plan at each point of a grid, for the command line; `sweep_processes` searches them.
- `server`: HTTP on the loopback interface.
- `page/`: the page itself, plain HTML, CSS and JavaScript; `document` puts it together with its data.
- `pages`: the pages of files, without a server.
"""
