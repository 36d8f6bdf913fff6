"""What the page and the HTTP API show, as plain data: no Gradio, no model, no HTML.

Every function here takes results of the library and returns strings, numbers, lists and dicts. `app.py` hands
them to components, whose scripts write them into the page as text.
"""
