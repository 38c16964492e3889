"""A stub of a service: ``python -m tests.benchmarks.stub_service PORT``."""

import base64
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

counts = {"accepted": 0, "completed": 0, "dropped": 0, "failed": 0}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, counts)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # every seventh is refused
        if body["seed"] % 7 == 6:
            return self._reply(429, {})
        buffer = io.BytesIO()
        Image.new("RGB", tuple(map(int, body["size"].split("x")))).save(buffer, "PNG")
        with lock:
            counts["accepted"] += 1
            counts["completed"] += 1
        image = {
            "b64_json": base64.b64encode(buffer.getvalue()).decode(),
            "num_inference_steps": body["num_inference_steps"],
            "timing": {"work_s": 0.001},
        }
        return self._reply(200, {"data": [image]})

    def log_message(self, *_: object) -> None:
        return

    def _reply(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    # of connections that a busy machine has not accepted yet; beyond it they are reset
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
