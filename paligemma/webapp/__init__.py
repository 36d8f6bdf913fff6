"""The web app: the page and the HTTP API, with Gradio.

`ui` builds the page and connects it to `handlers`; `api` adds the endpoints; `server` launches both and `cli` is the
command line. `served_models` runs the models, `execution` turns a run request into page updates, and `render` turns
results into the data that the scripts in `assets/page` draw.
"""
