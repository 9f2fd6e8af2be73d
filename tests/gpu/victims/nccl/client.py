"""Asks server.py for answers all the time, from some threads, each by one connection that it keeps.

    python client.py FOLDER [--threads 3] [--limit SECONDS]

FOLDER/answers-N gets ``<CLOCK_MONOTONIC> <prompt> <answer>`` for each request of thread N, or the error that it failed
with: nothing is asked twice. It ends when FOLDER/enough is there, and says how many were asked, answered and wrong: an
answer is wrong that is not what the same prompt got before.
"""

import argparse
import http.client
import os
import threading
import time


class Client:
    """One thread with its connection."""

    def __init__(self, folder, number, port, limit):
        self.folder, self.number, self.asked, self.answered, self.wrong, self.known = folder, number, 0, 0, 0, {}
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with open(os.path.join(self.folder, f"answers-{self.number}"), "a", buffering=1, encoding="ascii") as file:
            while not os.path.exists(os.path.join(self.folder, "enough")):
                prompt = (self.number * 7 + self.asked * 3) % 64
                self.asked += 1
                try:
                    self.connection.request("GET", f"/{prompt}")
                    reply = self.connection.getresponse()
                    answer = reply.read().decode()
                    assert reply.status == 200, reply.status
                    assert answer.split()[0] == str(prompt), answer
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    file.write(f"{time.monotonic():.6f} {prompt} FAILED {type(error).__name__}: {error}\n")
                    self.connection.close()
                    time.sleep(0.1)
                    continue
                self.answered += 1
                self.wrong += self.known.setdefault(prompt, answer) != answer
                file.write(f"{time.monotonic():.6f} {prompt} {answer}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60)
    options = parser.parse_args()
    with open(os.path.join(options.folder, "port"), encoding="ascii") as file:
        port = int(file.read())
    clients = [Client(options.folder, number, port, options.limit) for number in range(options.threads)]
    for client in clients:
        client.thread.join()
    asked, answered, wrong = (sum(getattr(c, what) for c in clients) for what in ("asked", "answered", "wrong"))
    print(f"ASKED {asked} ANSWERED {answered} WRONG {wrong}", flush=True)


if __name__ == "__main__":
    main()
