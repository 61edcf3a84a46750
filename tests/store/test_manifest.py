"""Manifests and parts: what is written is read back exactly, and nothing else passes for it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from store_support import KEY, OTHER_KEY, hkdf
from swansong.errors import (
    DamagedError,
    DigestMismatchError,
    LoadError,
    MalformedError,
    NotSupportedError,
    UnauthenticatedError,
    WrongKeyError,
)
from swansong.state import tree
from swansong.store import crypt
from swansong.store import manifest as module
from swansong.store.manifest import (
    SEALED_FIELDS,
    TAIL_SIZE,
    Chunk,
    FileRecord,
    Manifest,
    Part,
    TensorRecord,
    attach_tail,
    decode,
    decode_part,
    encode,
)
from swansong.store.saving import plain_skeleton

FILE = FileRecord(
    name="run-3_7.ckpt",
    size=20_000_000,
    piece=1 << 24,
    digests=["0" * 32, "1" * 32],
    scheme="mindspore-AES-GCM",
    salt="ab" * 16,
    macs=["2" * 32, "3" * 32],
)
FULL = Manifest(
    id="0123456789abcdef" * 2,
    name="run-3_7.ckpt",
    container="ckpt",
    series="run",
    stem="run_2",
    seq=41,
    kind="fault",
    run="fedcba9876543210" * 2,
    parent="1" * 32,
    step=107,
    boundary_step=105,
    epoch=3,
    step_in_epoch=7,
    world_size=8,
    created="2026-01-02T03:04:05.678901Z",
    software={"swansong": "1"},
    files=[
        FILE,
        msgspec.structs.replace(FILE, name=".swansong/run-3_7.ckpt.01234567.rest.safetensors.sealed"),
    ],
    components=[{"key": "model"}],
    tensors={
        "w": TensorRecord(
            dtype="bfloat16",
            shape=(4, 2),
            chunks=[
                Chunk(file=0, ranges=[(0, 4), (8, 12)], offset=(0, 0), shape=(2, 2)),
                Chunk(file=0, ranges=[(12, 20)], offset=(2, 0), shape=(2, 2)),
            ],
        ),
        "": TensorRecord(dtype="float32", shape=(), chunks=[Chunk(file=1, ranges=[(0, 4)])]),
    },
    aliases={"tied": "w"},
    objects={"state": {"tensor": "w"}, "extra": {"dict": [[1, {"tuple": [None, True]}]]}},
    rank_objects={"0": {"state": None}},
    append_info={"dict": [["lr", 0.1]]},
    inexact=[{"what": "dropout", "reason": "not reproducible"}],
)
SMALL = Manifest(
    id="0" * 32,
    name="n",
    container="ckpt",
    series="s",
    stem="s",
    seq=1,
    kind="periodic",
    run="r",
    step=1,
    created="2026-01-02T03:04:05.000000Z",
    files=[],
)
PART = Part(
    id="0" * 32, generation=1, attempt=2, rank=3, files=[FILE], tensors=FULL.tensors, objects={"a": 1}
)


def changed(raw: bytes, **fields: Any) -> bytes:
    """The unsealed manifest `raw` with other fields, and a tail that fits."""
    body, _ = module.detach_tail(raw, "m")
    return attach_tail(json.dumps(json.loads(body) | fields).encode(), None)


# -- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("manifest", [FULL, SMALL], ids=["every field", "defaults"])
def test_every_field_comes_back(manifest: Manifest, key: crypt.Key | None) -> None:
    got = decode(encode(manifest, key), "m", key)
    assert (got.key is not None) == (key is not None)
    assert msgspec.structs.replace(got, key=None) == manifest


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_every_field_of_a_part_comes_back(key: crypt.Key | None) -> None:
    assert msgspec.structs.replace(decode_part(encode(PART, key), "p", key), key=None) == PART


def test_the_full_example_leaves_no_field_at_its_default() -> None:
    unset = [
        field.name
        for field in msgspec.structs.fields(Manifest)
        if getattr(FULL, field.name) == getattr(SMALL, field.name)
    ]
    assert unset == ["format", "key", "sealed", "container"]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        0.1,
        1e300,
        5e-324,
        1.7976931348623157e308,
        2.0,
        2**63,
        -(2**200),
        True,
    ],
    ids=repr,
)
def test_appended_numbers_come_back_to_the_bit(value: float) -> None:
    manifest = msgspec.structs.replace(SMALL, append_info=plain_skeleton({"x": value}, "append_info"))
    got = tree.unflatten(decode(encode(manifest, None), "m").append_info, {})["x"]
    assert type(got) is type(value)
    assert got == value or (math.isnan(got) and math.isnan(value))
    assert math.copysign(1, got) == math.copysign(1, value)


@given(st.dictionaries(st.text(max_size=20), st.floats() | st.integers() | st.text(max_size=20) | st.none()))
def test_objects_of_any_text_come_back(objects: dict[str, Any]) -> None:
    manifest = msgspec.structs.replace(SMALL, objects={"extra": plain_skeleton(objects, "objects")})
    got = tree.unflatten((decode(encode(manifest, KEY), "m", KEY).objects or {})["extra"], {})
    assert repr(got) == repr(objects)


# -- the tail --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_the_tail_has_its_fixed_form(key: crypt.Key | None) -> None:
    raw = encode(FULL, key)
    json.loads(raw)
    tail = raw[-TAIL_SIZE:].decode()
    digest = xxhash.xxh3_128_hexdigest(raw[:-49])
    mac = "null" + 62 * " "
    if key is not None:
        salt = bytes.fromhex(json.loads(raw)["key"]["salt"])
        code = crypt.message_mac(hkdf(key.material, salt, b"swansong/1 manifest mac"), raw[:-TAIL_SIZE])
        mac = f'"{code}"'
    assert tail == f',"tail":{{"mac":{mac},"xxh3_128":"{digest}"}}}}\n'


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_one_flipped_bit_anywhere_is_noticed_without_a_key(key: crypt.Key | None) -> None:
    raw = encode(SMALL, key)
    for at in range(len(raw)):
        for bit in range(8):
            broken = raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
            with pytest.raises(DamagedError, match=r"^m: ") as caught:
                decode(broken, "m")
            assert caught.value.file == "m"


def test_a_cut_anywhere_or_one_byte_more_is_noticed() -> None:
    raw = encode(SMALL, None) + b"\n"
    for length in {*range(len(raw) + 1)} - {len(raw) - 1}:
        with pytest.raises(MalformedError, match=r"^m: wanted a manifest that ends with its digest, found"):
            decode(raw[:length], "m")


def test_a_digest_that_differs_is_told_with_both() -> None:
    raw = encode(SMALL, None).replace(b'"seq":1,', b'"seq":2,')
    with pytest.raises(DigestMismatchError, match="own digest") as caught:
        decode(raw, "m")
    assert caught.value.want != caught.value.got == xxhash.xxh3_128_hexdigest(raw[:-49])


# -- versions and fields ---------------------------------------------------------------------------


def test_unknown_fields_are_ignored() -> None:
    raw = changed(encode(FULL, None), invented={"deep": [1, {"er": None}]}, another=1e300)
    assert decode(raw, "m") == FULL


@pytest.mark.parametrize("version", ["swansong/1", "swansong/1.7"])
def test_the_same_major_version_is_read(version: str) -> None:
    assert decode(changed(encode(SMALL, None), format=version), "m").seq == 1


@pytest.mark.parametrize("version", ["swansong/2", "swansong/2.0", "swansong/10"])
def test_a_higher_major_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(
        NotSupportedError, match=rf"written in format {version}, this release reads swansong/1"
    ):
        decode(changed(encode(SMALL, None), format=version, files="not even a list"), "m")


@pytest.mark.parametrize(
    "version",
    [
        "swansong/0",
        "swansong/",
        "swansong",
        "swansong/x",
        "swansong/²",
        "orbax/1",
        "",
        "swansong/" + "9" * 5000,
    ],
)
def test_what_is_no_version_of_ours_is_malformed(version: str) -> None:
    with pytest.raises(MalformedError, match="wanted a manifest of format swansong/1") as caught:
        decode(changed(encode(SMALL, None), format=version), "m")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"created": "yesterday"}, "no time"),
        ({"created": "2026-13-01T00:00:00.000000Z"}, "no time"),
        ({"seq": "1"}, "seq"),
        ({"seq": 1.5}, "seq"),
        ({"step": None}, "step"),
        ({"tensors": []}, "tensors"),
        ({"objects": []}, "objects"),
        ({"tensors": {"w": {"dtype": "bool", "shape": [1.5], "chunks": []}}}, "shape"),
        (
            {"tensors": {"w": {"dtype": "bool", "shape": [1], "chunks": [{"file": 0, "ranges": [[1]]}]}}},
            "ranges",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_of_the_wrong_kind_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        decode(changed(encode(SMALL, None), **fields), "m")


@pytest.mark.parametrize("field", ["id", "files", "seq", "created", "container"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    body = json.loads(module.detach_tail(encode(SMALL, None), "m")[0])
    del body[field]
    with pytest.raises(MalformedError, match=f"missing required field `{field}`"):
        decode(attach_tail(json.dumps(body).encode(), None), "m")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../x",
            "/etc/passwd",
            "a/../b",
            "",
            ".",
            "..",
            ".swansong/..",
            ".swansong/a/b",
            "a\0b",
            "a/b",
            "./a",
        ),
        *(
            "rank_0/..",
            "rank_0/a/b",
            "rank_/x",
            "rank_a/x",
            "rank_\u0663/x",
            "xrank_0/x",
            "rank_0/.swansong/x",
        ),
    ],
)
def test_a_file_that_leads_out_of_the_checkpoint_is_refused(name: str) -> None:
    record = msgspec.to_builtins(FILE) | {"name": name}
    with pytest.raises(MalformedError, match="name"):
        decode(changed(encode(SMALL, None), files=[record]), "m")


@pytest.mark.parametrize(
    "name", ["a b", "ä\n", "..a", "...", ".swansong/x", "%", ".swansongs", "rank_0/x.ckpt", "rank_12/x"]
)
def test_a_file_of_an_odd_name_is_not(name: str) -> None:
    record = msgspec.to_builtins(FILE) | {"name": name}
    assert decode(changed(encode(SMALL, None), files=[record]), "m").files[0].name == name


@pytest.mark.parametrize(
    "field",
    [
        {"size": -1},
        {"size": 2**63},
        {"piece": 0},
        {"piece": -4},
        {"piece": 2**24 + 1},
        {"salt": "zz" * 16},
        {"salt": "ab"},
    ],
    ids=str,
)
def test_a_file_with_numbers_that_cannot_be_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=next(iter(field))):
        decode(changed(encode(SMALL, None), files=[msgspec.to_builtins(FILE) | field]), "m")


# -- keys ------------------------------------------------------------------------------------------


def test_sealing_leaves_readable_what_orders_and_checks_and_nothing_else() -> None:
    raw = encode(FULL, KEY)
    public = json.loads(raw).keys() - {"tail"}
    everything = {field.name for field in msgspec.structs.fields(Manifest)}
    assert public == everything - set(SEALED_FIELDS)
    for private in (b"bfloat16", b"tied", b"dropout", b"model", b'"tensor"'):
        assert private in encode(FULL, None)
        assert private not in raw


def test_without_the_key_the_public_fields_are_read_and_the_others_are_empty() -> None:
    got = decode(encode(FULL, KEY), "m")
    assert not got.readable
    assert (got.seq, got.files, got.parent, got.created) == (41, FULL.files, FULL.parent, FULL.created)
    assert (got.tensors, got.objects, got.append_info, got.boundary_step) == ({}, None, None, None)


def test_another_key_is_told_from_damage() -> None:
    raw = encode(FULL, KEY)
    with pytest.raises(WrongKeyError, match="another key"):
        decode(raw, "m", OTHER_KEY)
    body, mac = module.detach_tail(raw, "m")
    forged = attach_tail(body.replace(b'"seq":41', b'"seq":42'), None)
    forged = forged.replace(b"null" + b" " * 62, f'"{mac}"'.encode())
    forged = forged[:-49] + f',"xxh3_128":"{xxhash.xxh3_128_hexdigest(forged[:-49])}"}}}}\n'.encode()
    assert decode(forged, "m").seq == 42  # its digest fits: without the key there is nothing to tell
    with pytest.raises(DamagedError, match="does not authenticate"):
        decode(forged, "m", KEY)


def test_a_sealed_part_moved_into_another_manifest_does_not_authenticate() -> None:
    one, other = json.loads(encode(FULL, KEY)), encode(msgspec.structs.replace(FULL, id="9" * 32), KEY)
    mixed = json.loads(module.detach_tail(other, "m")[0]) | {"sealed": one["sealed"], "key": one["key"]}
    salt = bytes.fromhex(one["key"]["salt"])
    raw = attach_tail(json.dumps(mixed).encode(), KEY.derive(salt, "manifest mac"))
    with pytest.raises(DamagedError, match="sealed part of the manifest does not authenticate"):
        decode(raw, "m", KEY)


@pytest.mark.parametrize("strip", ["unsealed", "mac removed"])
def test_a_key_and_nothing_that_proves_its_use_is_unauthenticated(strip: str) -> None:
    raw = encode(FULL, None)
    if strip == "mac removed":
        raw = attach_tail(module.detach_tail(encode(FULL, KEY), "m")[0], None)
    with pytest.raises(UnauthenticatedError, match="nothing proves who wrote it"):
        decode(raw, "m", KEY)


@pytest.mark.parametrize(
    "sealed", ["", "####", "AAAA", "A" * 400], ids=["empty", "no base64", "short", "wrong"]
)
def test_a_sealed_field_that_cannot_be_opened_is_damage(sealed: str) -> None:
    body = json.loads(module.detach_tail(encode(FULL, KEY), "m")[0]) | {"sealed": sealed}
    key = KEY.derive(bytes.fromhex(body["key"]["salt"]), "manifest mac")
    with pytest.raises(DamagedError, match="does not authenticate"):
        decode(attach_tail(json.dumps(body).encode(), key), "m", KEY)


@pytest.mark.parametrize("private", [b"[]", b'{"tensors": 3}', b"no json", b'{"seq": "x"}'], ids=str)
def test_a_sealed_field_of_the_right_key_and_the_wrong_form_is_malformed(private: bytes) -> None:
    body = json.loads(module.detach_tail(encode(FULL, KEY), "m")[0])
    salt = bytes.fromhex(body["key"]["salt"])
    box = crypt.seal_message(KEY.derive(salt, "manifest"), private, FULL.id.encode())
    body["sealed"] = msgspec.json.decode(msgspec.json.encode(box))
    with pytest.raises(MalformedError, match="its sealed part"):
        decode(attach_tail(json.dumps(body).encode(), KEY.derive(salt, "manifest mac")), "m", KEY)


@pytest.mark.parametrize("check", ["", "é" * 8, "0" * 16])
def test_a_check_value_of_any_text_is_another_key(check: str) -> None:
    body = json.loads(module.detach_tail(encode(FULL, KEY), "m")[0])
    body["key"]["check"] = check
    key = KEY.derive(bytes.fromhex(body["key"]["salt"]), "manifest mac")
    with pytest.raises(LoadError, match="another key"):
        decode(attach_tail(json.dumps(body).encode(), key), "m", KEY)
