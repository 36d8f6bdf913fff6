"""What stands behind the page and the HTTP API, without Gradio and without HTML.

Most modules turn results of the library into strings, numbers, lists and dicts, which `app.py` hands to components,
whose scripts write them into the page as text. `models`, `serving`, `visit`, `runner` and `logs` are the server's: the
models that it holds, its limits, what it keeps of a visitor, how it carries out a plan, and its log.
"""
