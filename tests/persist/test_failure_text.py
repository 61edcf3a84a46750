"""What the words of an exception tell, by messages as libraries have written them."""

from __future__ import annotations

import pytest

from swansong.persist.failure_text import COMPARED, normalised, tells_of_a_peer

GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
ADVICE = "Check the logs of the remote worker before reporting an error. GLHF!"
CLOSED = (
    GLOO + "pair.cc:553] Connection closed by peer {}. This is typically caused by a remote worker crashing. "
)
RESET = GLOO + "pair.cc:537] Read error {}: Connection reset by peer. " + ADVICE
NCCL = (
    "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process "
    "exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
WATCHDOG = (
    "RuntimeError: [Rank 4] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
    "OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for {} milliseconds before "
    "timing out."
)
STORE = "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to ({})."
C10D = "DistNetworkError: recvValue failed on SocketImpl(fd={}, addr=[localhost]:{}, remote=[{}]:29500)"
MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
    "79.15 GiB of which {} is free. Process {} has {} memory in use. Of the allocated memory {} is allocated "
    "by PyTorch, and {} is reserved by PyTorch but unallocated."
)
OLDER_MEMORY = (
    "RuntimeError: CUDA out of memory. Tried to allocate 36.00 MiB (GPU 0; 10.76 GiB total capacity; "
    "{} already allocated; {} free; {} reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("form", "once", "again"),
    [
        (CLOSED, ("[127.0.0.1]:57531",), ("[127.0.0.1]:1988",)),
        (CLOSED, ("[172.28.0.12]:14004",), ("[172.28.0.7]:43185",)),
        (CLOSED, ("[::1]:14004",), ("[fe80::1ff:fe23:4567:890a%eth0]:43185",)),
        (RESET, ("[127.0.0.1]:18333",), ("[127.0.0.1]:38251",)),
        (NCCL + "socketProgressOpt: Call to recv from {} failed", ("10.2.3.4<33759>",), ("10.2.3.5<412>",)),
        (NCCL + "Net : Connection closed by remote peer {}", ("node2<42830>",), ("a100-2.cluster<47861>",)),
        (NCCL + "NET/OFI Request {} completed with error", ("0x7f14cc5b60c0",), ("0x55d1a3c0f2e8",)),
        (WATCHDOG, (7753, 600061), (4, 600099)),
        ("RuntimeError: at work: {}, last completed NCCL work: {}.", (7753, 7752), (12, 11)),
        (STORE, ("172.17.0.9, 46229",), ("172.17.0.10, 4622",)),
        (STORE, ("036c56dce41b, 41331",), ("node-7.cluster, 41332",)),
        (C10D, (64, 45678, "node-1"), (7, 9999, "node-23.cluster")),
        ("OSError: Timed out trying to connect to 'tcp://{}' after 10 s", ("node:8000",), ("node-2:8001",)),
        ("OSError: no answer of {}", ("localhost:8000",), ("localhost:44444",)),
        ("RuntimeError: failed to listen. port: {}, useIpv6: false", (29500,), (29501,)),
        ("ConnectionRefusedError: ('{}', {})", ("10.0.0.1", 29500), ("10.0.0.2", 301)),
        ("RuntimeError: DataLoader worker (pid {}) is killed by signal: Killed.", (19597,), (412,)),
        ("RuntimeError: DataLoader worker (pid(s) {}) exited unexpectedly", ("12, 13",), ("412",)),
        ("RuntimeError: unable to mmap 64 bytes from file </torch_{}>", ("1801_2887_0",), ("77_15_210",)),
        ("TypeError: <model.Block object at {}> is no tensor", ("0x9c3f20",), ("0x7f15b276c1b6",)),
        (
            MEMORY,
            ("10.25 MiB", 7, "1.1 GiB", "77.04 GiB", "1 GiB"),
            ("1 bytes", 99, "9 GiB", "7 GiB", "0 bytes"),
        ),
        (OLDER_MEMORY, ("996.23 MiB", "8.81 MiB", "1010.00 MiB"), ("1.2 GiB", "3.0 MiB", "2.1 GiB")),
        ("TimeoutError: gave up after {}", ("3.25 seconds",), ("12 seconds",)),
        ("TimeoutError: gave up after {}", ("0.031s",), ("1.5 s",)),
        ("TimeoutError: gave up after {}", ("1e-05 seconds",), ("250us",)),
    ],
    ids=[
        "gloo, closed",
        "gloo, another host",
        "gloo over IPv6",
        "gloo, reset",
        "NCCL with address",
        "NCCL with a host's name",
        "NCCL with a pointer",
        "NCCL's watchdog",
        "NCCL's counts",
        "store, address",
        "store, host's name",
        "c10d socket",
        "URL",
        "localhost",
        "port",
        "Python's socket address",
        "process",
        "processes",
        "shared memory",
        "object",
        "CUDA's memory",
        "CUDA's memory, older",
        "seconds",
        "short seconds",
        "tiny seconds",
    ],
)
def test_what_differs_from_run_to_run_does_not_count(
    form: str, once: tuple[object, ...], again: tuple[object, ...]
) -> None:
    assert form.format(*once) != form.format(*again)
    assert normalised(form.format(*once)) == normalised(form.format(*again))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("IndexError: index 5 is out of range", "IndexError: index 6 is out of range"),
        ("ValueError: bad batch at step 7", "ValueError: bad batch at step 8"),
        ("RuntimeError: shape [2, 3] for [3, 2]", "RuntimeError: shape [2, 3] for [3, 4]"),
        ("RuntimeError: shape '[8, 16]' for size 120", "RuntimeError: shape '[8, 16]' for size 127"),
        ("ValueError: loss is nan in layer1:2", "ValueError: loss is nan in layer1:3"),
        ("RuntimeError: expected a[0]:5", "RuntimeError: expected a[0]:6"),
        ("RuntimeError: slices[3]:17", "RuntimeError: slices[3]:18"),
        ("RuntimeError: error in kernel.cu:12", "RuntimeError: error in kernel.cu:13"),
        ("RuntimeError: code 0x7110000", "RuntimeError: code 0x7110001"),
        ("RuntimeError: tried to allocate 64 bytes", "RuntimeError: tried to allocate 65 bytes"),
        ("RuntimeError: tried to allocate 1.00 GiB", "RuntimeError: tried to allocate 2.00 GiB"),
        ("ValueError: rank 3 has 5 files", "ValueError: rank 3 has 4 files"),
        ("ValueError: version 1.2.3", "ValueError: version 1.2.4"),
        ("RuntimeError: array<16>", "RuntimeError: array<32>"),
        ("ValueError: support 5 samples", "ValueError: support 6 samples"),
        ("RuntimeError: process 0 terminated with signal", "RuntimeError: process 1 terminated with signal"),
        (CLOSED.format("[10.0.0.1]:5"), RESET.format("[10.0.0.1]:5")),
        (CLOSED.format("[10.0.0.1]:5"), CLOSED.format("[10.0.0.1]:5").replace("Runtime", "OS")),
    ],
    ids=lambda text: text[:40],
)
def test_what_failed_counts_with_every_number_in_it(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_where_a_long_message_was_cut_off_does_not_count() -> None:
    long = "RuntimeError: " + 8 * "Connection closed by peer [10.0.0.1]:{port}, and once more we tried it. "
    one, other = ((long.format(port=port) + "".join(map(str, range(500))))[:1000] for port in (5, 54321))
    assert one[-9:] != other[-9:]
    assert normalised(one) == normalised(other)
    assert len(normalised(one)) == COMPARED


@pytest.mark.parametrize(
    "unit", ["a.", "[1:", "1.", "peer a", "0x1", "1 ", "pid 1, ", "://a-", "connection "]
)
def test_of_a_message_of_any_length_so_much_is_looked_at(unit: str) -> None:
    hostile = unit * (20_000_000 // len(unit))
    assert len(normalised(hostile)) <= COMPARED
    assert not tells_of_a_peer(hostile, hostile)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (CLOSED, True),
        (RESET, True),
        (GLOO + "unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete", True),
        (NCCL, True),
        (WATCHDOG, True),
        (STORE, True),
        ("DistBackendError: Failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("RuntimeError: [1]: NCCL communicator was aborted on rank 1.", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", True),
        ("RuntimeError: Rank 1 failed to pass monitoredBarrier in 2000 ms", True),
        ("ValueError: bad batch", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("OutOfMemoryError: CUDA out of memory", False),
        ("KeyError: 'connection'", False),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Killed.", False),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_who_speaks_of_a_peer_that_is_gone(what: str, told: bool) -> None:
    assert tells_of_a_peer(what) is told
    assert (
        tells_of_a_peer("StepFailed: see above", f"Traceback ...\n{what}\n\nThe above exception ...") is told
    )
