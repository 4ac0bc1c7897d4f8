"""Join records: their bytes, and what ranks make of all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from numba_meta.comm.record import (
    RECORD_BYTES,
    WIRE_VERSION,
    JoinRecord,
    decode_record,
    encode_record,
    facts_of,
    format_cores,
    judge,
    parse_cores,
)

A = JoinRecord(0, "hostA", "ka", 10, "0.2", facts={"cuts": "0-9", "ctx_size": "4096"}, offers=("mpi",), cores="0-1")
B = replace(A, rank=1, host="hostB", host_key="kb", process=11)
text = st.text(max_size=60)


@given(text, text, st.dictionaries(text, text, max_size=5), st.lists(text, max_size=3), st.booleans())
def test_records_survive_the_wire(host, reason, facts, offers, ok):
    record = replace(B, host=host, reason=reason, facts=facts, offers=tuple(offers), ok=ok, available_host_bytes=1 << 40)
    data = encode_record(record)
    assert len(data) == RECORD_BYTES
    assert decode_record(data, 1) == record


def test_long_facts_keep_the_size_and_the_difference():
    long = replace(A, facts={"cuts": "1," * 5000}, reason="x" * 5000)
    other = replace(B, facts={"cuts": "1," * 4999 + "2,"})
    many = replace(A, facts={f"option {i}": "y" * 200 for i in range(200)})
    many_other = replace(many, rank=1, process=11, facts=many.facts | {"option 199": "z"})
    for left, right in ((long, other), (many, many_other)):
        assert len(encode_record(left)) == len(encode_record(right)) == RECORD_BYTES
        seen = [decode_record(encode_record(each), rank) for rank, each in enumerate((left, right))]
        verdict = judge(seen)
        assert verdict is not None and verdict[0].count("sha256") == 2
        assert judge([seen[0], replace(seen[0], rank=1, process=12)]) is None


@given(st.binary(max_size=60), st.booleans())
def test_garbage_says_no(data, behind_the_name):
    start = encode_record(B)[:20] if behind_the_name else b""
    verdict = judge([A, decode_record((start + data).ljust(RECORD_BYTES, b"\xfe"), 1)])
    assert verdict is not None and "rank 1" in verdict[0]


def test_ranks_that_fit():
    assert judge([A]) is None
    assert judge([A, B]) is None


def test_versions_first_with_both_values_and_hosts():
    verdict = judge([A, replace(B, version="0.3", wire_version=WIRE_VERSION + 1, ok=False, reason="no such device")])
    assert verdict == (
        f"rank 1 (hostB) runs numba_meta 0.3 (wire format {WIRE_VERSION + 1}), rank 0 (hostA) runs numba_meta 0.2 (wire format "
        f"{WIRE_VERSION}); install the same version for every rank", 1
    )  # fmt: skip


def test_another_wire_format_is_still_readable():
    data = encode_record(replace(B, wire_version=7))
    assert decode_record(data, 1).wire_version == 7 and decode_record(data, 1).host == "hostB"


def test_a_refusal_is_named_with_its_status():
    assert judge([A, replace(B, ok=False, reason="cuda:0 is missing", exit_status=2)]) == ("rank 1 (hostB): cuda:0 is missing", 2)
    three = [replace(A, ok=False, reason="a"), B, replace(B, rank=2, process=12, ok=False, reason="c")]
    assert judge(three) == ("rank 0 (hostA): a (and 1 more of 3 ranks)", 1)


def test_what_all_say_is_said_as_by_one():
    assert judge([replace(A, ok=False, reason="no such file"), replace(B, ok=False, reason="no such file")]) == ("no such file", 1)


def test_facts_with_both_values():
    verdict = judge([A, replace(B, facts=A.facts | {"ctx_size": "2048"})])
    assert verdict is not None and verdict[0].startswith("rank 1 (hostB) has ctx_size 2048, rank 0 (hostA) has 4096;")
    missing = judge([A, replace(B, facts={"cuts": "0-9"})])
    assert missing is not None and "has ctx_size nothing, rank 0 (hostA) has 4096" in missing[0]
    extra = judge([A, replace(B, facts=A.facts | {"exact": "True"})])
    assert extra is not None and "has exact True, rank 0 (hostA) has nothing" in extra[0]


def test_a_rank_that_joins_twice():
    same = judge([A, replace(B, host_key=A.host_key, process=A.process)])
    assert same is not None and "rank 1 (process 10 on hostB) joined twice, also as rank 0" in same[0]
    assert judge([A, replace(B, rank=0)]) is not None


def test_facts_of_a_model_and_its_options():
    facts = facts_of(b"header", (0, 4, 9), {"exact": True, "kv": "host"})
    assert facts == facts_of(b"header", (0, 4, 9), {"exact": True, "kv": "host"})
    assert facts["cuts"] == "(0, 4, 9)" and facts["exact"] == "True"
    assert facts["model header"] != facts_of(b"headeR", (0, 4, 9), {})["model header"]


@given(st.frozensets(st.integers(0, 300)))
def test_cores_round_trip(cores):
    assert parse_cores(format_cores(cores)) == cores


def test_cores_are_ranges():
    assert format_cores({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
