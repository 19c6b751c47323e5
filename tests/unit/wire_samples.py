"""Samples of the messages of the router and of sessions, and checksums of their bytes.

Each sample is the plainest of its kind.
"""

from __future__ import annotations

from fuzz_kit import example

from protocol.messages import ROUTING_MESSAGES, SESSION_MESSAGES, FetchInitial, Message

ROUTING_SAMPLES: tuple[Message, ...] = tuple(example(model) for model in ROUTING_MESSAGES)
# crc32 of the bytes of each sample, with sequence 7 and ack 5
ROUTING_GOLDEN = {
    "flow_introduce": "796c7b26",
    "flow_offers": "67cfdb85",
    "flow_request": "e01f49f6",
    "flow_answer": "3b32264d",
    "flow_costs": "fb9db26c",
    "flow_check": "e2dbd91e",
    "flow_release": "dccc0aa7",
    "flow_labels": "f878e1de",
    "token_prepare": "d9387e49",
    "token_vote": "366e103f",
    "token_end": "94411463",
    "token_ask": "4c5ae8c5",
    "flow_state": "53ad0cd7",
    "flow_walk": "6604cf22",
    "flow_meet": "cc1a85ef",
}

SESSION_SAMPLES: tuple[Message, ...] = tuple(
    example(model) for model in (*SESSION_MESSAGES, FetchInitial)
)
SESSION_GOLDEN = {
    "pin": "d7dc53e5",
    "pinned": "fbd933b4",
    "unpin": "9403a8d9",
    "extend": "4683b515",
    "stuck": "fac7f25d",
    "fetch_pinned": "21bed5a3",
    "fetch_initial": "a3f4544c",
}
