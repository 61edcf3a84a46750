"""What the words of an exception tell: whether two are the same failure, and whether a peer's end is behind.

The patterns are made from messages of gloo, NCCL, c10d, the CUDA allocator and data loaders, as
`tests/persist/test_failure_text.py` has them. Pure.
"""

from __future__ import annotations

import re
from typing import Final

COMPARED: Final = 700
"""So many characters are compared, after normalisation. Ranks report 1000, and where those end differs with
the length of an address."""

_READ: Final = 1000
_TRACE_READ: Final = 8000
"""Characters of what may be longer in a report from elsewhere."""

_NAME: Final = r"[A-Za-z0-9](?:[\w.-]{0,250}[A-Za-z0-9])?"
_IPV4: Final = r"\d{1,3}(?:\.\d{1,3}){3}"
_IPV6: Final = r"[0-9A-Fa-f]{0,4}:[0-9A-Fa-f.]{0,15}:[0-9A-Fa-f:.]{0,40}(?:%\w{1,16})?"
_NUMBER: Final = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_AMOUNT: Final = r"\d+(?:\.\d+)? (?:bytes|[KMGT]i?B)"
_OF_MEMORY: Final = r"(?:is )?(?:free|already allocated|allocated by PyTorch|reserved|memory in use|cached)"

_VARYING: Final = tuple(
    (re.compile(pattern), put)
    for pattern, put in (
        # Sockets: [127.0.0.1]:38251, [::1]:38251, [node-1]:29500, 10.0.0.7<33759>, (10.0.0.7, 29500),
        # tcp://node-1:29500, connect to (node-1, 29500), remote peer node-1<47861>, port: 29500, fd=64.
        (rf"\[(?:{_IPV4}|{_IPV6})\]:\d{{1,5}}\b", "<address>"),
        (rf"(?<!\w)\[(?=[\w.-]*[A-Za-z]){_NAME}\]:\d{{4,5}}\b", "<address>"),
        (rf"(?<![\w.]){_IPV4}(?![\w.]\d)(?::\d{{1,5}}\b|<\d{{1,5}}>|'?, ?\d{{1,5}}(?=\)))?", "<address>"),
        (r"\blocalhost(?::|'?, ?)\d{1,5}\b", "<address>"),
        (rf"://{_NAME}:\d{{1,5}}\b", "://<address>"),
        (rf"\bpeer {_NAME}<\d{{1,5}}>", "peer <address>"),
        (rf"\bconnect to \({_NAME}, \d{{1,5}}\)", "connect to (<address>)"),
        (rf"\bconnect to {_NAME}:\d{{1,5}}\b", "connect to <address>"),
        (r"(?i)\b(port(?: number)?)([ :=]{1,3})\d{1,5}\b", r"\1\2<port>"),
        (r"\bfd=\d+", "fd=<fd>"),
        # Processes: pid 4711, (pid(s) 12, 13), and the allocator's "Process 4711 has".
        (r"(?i)\b([pt]id(?:\(s\))?)([ :=]{1,3})\d+(?:, ?\d+)*", r"\1\2<id>"),
        (r"\bProcess \d+ has\b", "Process <id> has"),
        (r"/torch_\d+_\d+_\d+\b", "/torch_<id>"),
        # Pointers; codes of 32 bits are none, unless said to be.
        (r"\b0x[0-9A-Fa-f]{9,16}\b", "<pointer>"),
        (r"\b(at|address) 0x[0-9A-Fa-f]{1,16}\b", r"\1 <pointer>"),
        # How long it took, how much was free, and how many collectives this start had made.
        (
            rf"(?<![\w.]){_NUMBER} ?(?:[mun]s|(?:milli|micro)?seconds?|secs?|minutes?|hours?)\b",
            "<time>",
        ),
        (rf"(?<![\w.])(?:{_NUMBER} s|\d+\.\d+s)\b", "<time>"),
        (
            rf"{_AMOUNT}(?= {_OF_MEMORY}\b)",
            "<memory>",
        ),
        (r"\bSeqNum=\d+", "SeqNum=<number>"),
        (r"\b(NCCL work: |at work: )\d+", r"\1<number>"),
    )
)

_PEER_GONE: Final = re.compile(
    r"""connection\ (?:was\ |is\ )?(?:likely\ )?(?:closed|reset|refused|aborted|lost|broken)
      | (?:reset|closed)\ by\ (?:the\ )?(?:remote\ )?peer
      | broken\ ?pipe
      | \bConnection(?:Reset|Refused|Aborted)?Error\b
      | \bDistNetworkError\b
      | \bsocket\ (?:closed|timeout)
      | remote\ process\ exited
      | \bncclRemoteError\b
      | communicator\ was\ aborted
      | collective\ operation\ timeout
      | timed\ out\ waiting\ \d+\ ?ms\ for\ (?:send|recv)
      | monitoredBarrier""",
    re.VERBOSE | re.IGNORECASE,
)


def normalised(what: str) -> str:
    """An exception's type and message without what differs from run to run though the failure is the same.

    Replaced are addresses and ports of sockets, process ids, pointers, durations, amounts of memory that are
    free or used, and counts of collectives, each only in a form that tells it as such. Any other number says
    what failed (an index, a shape, a step) and stays. At most `COMPARED` characters.
    """
    text = what[:_READ]
    for pattern, put in _VARYING:
        text = pattern.sub(put, text)
    return text[:COMPARED]


def tells_of_a_peer(what: str, traceback: str = "") -> bool:
    """True if an exception, or one in its traceback that it was made of, says that a peer cannot be reached.

    Such an exception is seldom the whole story: something has ended, or keeps, the peer.
    """
    return any(_PEER_GONE.search(text) for text in (what[:_READ], traceback[-_TRACE_READ:]))
