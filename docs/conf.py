"""Settings of the documentation site: `sphinx-build -W docs site`."""

import importlib.metadata

project = "bapipe"
release = version = importlib.metadata.version("bapipe")
html_title = "bapipe"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 4
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_ivar = True
nitpicky = False
