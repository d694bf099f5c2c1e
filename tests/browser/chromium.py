"""What the checks in a browser share: a server for a folder, and how Chromium is started."""

import functools
import http.server
import threading

CHROMIUM = "/usr/bin/chromium"
OPTIONS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WIDTHS = {"desktop": (1280, 800), "phone": (390, 844)}


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *_):
        pass


def serve(folder):
    """Serve a folder on a free port, and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    server.handle_error = lambda *_: None  # a page that is closed while it loads
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
