"""A listening and a connected inet socket, a unix pair, UDP and pipes, all between a process and its child."""

import os
import signal
import socket

from common import folder, loop

listening = socket.create_server(("127.0.0.1", 0))
waiting = socket.create_server(os.path.join(folder(), "sock"), family=socket.AF_UNIX)
ours, theirs = socket.socketpair()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
down, up = os.pipe(), os.pipe()

child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connected = socket.create_connection(listening.getsockname())
    answer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.close()
    os.close(down[1])  # or we would never see that our parent has gone
    while data := os.read(down[0], 64):
        if data.startswith(b"again"):
            answer.sendto(data[5:], udp.getsockname())
            continue
        connected.sendall(connected.recv(64))
        theirs.sendall(theirs.recv(64))
        answer.sendto(data, udp.getsockname())
        os.write(up[1], data)
    os._exit(0)
theirs.close()
peer, _ = listening.accept()
for s in (peer, ours):
    s.settimeout(20)
udp.settimeout(2)


def check(n):
    message = b"%08d" % n
    os.write(down[1], message)
    peer.sendall(message)
    assert peer.recv(64) == message
    ours.sendall(message)
    assert ours.recv(64) == message
    assert os.read(up[0], 64) == message
    try:
        assert udp.recv(64) == message
    except TimeoutError:  # CRIU keeps no datagrams that wait in a socket, as a network would not have to
        os.write(down[1], b"again" + message)
        assert udp.recv(64) == message


loop(check)
os.close(down[1])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
