import functools
import http.server
import threading

import pytest


@pytest.fixture
def server(tmp_path):
    """A web server on this machine over a folder of its own: (folder, address)."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path.endswith("short"):  # announces more than it sends
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"only this")
            else:
                super().do_GET()

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    web.server_close()
    thread.join()
