"""A server that looks like vLLM's to a router, without a model.

``fake_engine.py PORT RECORD [FAULT]``: requests go to the file RECORD, a line each.
It answers with the number of characters of the last message, and counts 1,000 bytes
read for each request that names another engine's blocks. FAULT is what it does when it
is asked: ``die``, ``refuse``, ``differ`` or ``break`` (in the middle of a stream).
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, RECORD = int(sys.argv[1]), sys.argv[2]
FAULT = sys.argv[3] if len(sys.argv) > 3 else ""
HANDED_OVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_request_id": "lease",
    "of_a_later_version": {"a": [1, None]},
}

read_bytes = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(f"vllm:nixl_bytes_transferred_sum {read_bytes}\n", "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(RECORD, "a") as record:
            record.write(json.dumps({"path": self.path, "body": body}) + "\n")
        if self.path != "/v1/chat/completions":
            self.send_error(404)
        elif FAULT == "die":
            os._exit(3)
        elif FAULT == "refuse":
            self.send_error(503)
        else:
            self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        global read_bytes
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "?"}}
            whole = {"choices": [choice], "kv_transfer_params": HANDED_OVER}
            self._send(json.dumps(whole), "application/json")
            return
        if params.get("do_remote_prefill"):
            read_bytes += 1000
        self._stream(len(body["messages"][-1]["content"]))

    def _stream(self, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        words = [f"{length}", " characters" if FAULT != "differ" else " letters"]
        for word in words:
            self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
            if FAULT == "break":
                return
        self._event({"choices": [], "usage": {"prompt_tokens": length}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
