"""Both header encodings as whole bytes, what is tolerated on input, and what is refused."""

from __future__ import annotations

import pytest

from escrowmq.errors import BrokenHeader, LocalProtocolError
from escrowmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    JSON,
    ROCKETMQ,
    Language,
    RequestCode,
)
from escrowmq.remoting.command import Command, decode_command, encode_command
from escrowmq.remoting.frame import Frame, FrameDecoder, encode_frame

ROUTE = Command(
    code=105,
    language=Language.PYTHON,
    version=479,
    opaque=1,
    flag=0,
    ext_fields={"topic": "TBW102"},
)
ROUTE_JSON = bytes.fromhex(
    "00000086 00000082 7b22636f6465223a3130352c226c616e6775616765223a22505954484f4e222c2276"
    "657273696f6e223a3437392c226f7061717565223a312c22666c6167223a302c2273657269616c697a6554"
    "79706543757272656e74525043223a224a534f4e222c226578744669656c6473223a7b22746f706963223a"
    "22544257313032227d7d"
)
ROUTE_ROCKETMQ = bytes.fromhex(
    "0000002a 01000026 0069 03 01df 00000001 00000000 00000000 00000011"
    "0005 746f706963 00000006 544257313032"
)


@pytest.mark.parametrize(("serializer", "frame"), [(JSON, ROUTE_JSON), (ROCKETMQ, ROUTE_ROCKETMQ)])
def test_the_route_request_byte_by_byte(serializer: int, frame: bytes) -> None:
    assert encode_frame(serializer, encode_command(ROUTE, serializer)) == frame
    reader = FrameDecoder(Frame)
    reader.receive(frame)
    (read,) = reader.frames()
    assert read.serializer == serializer
    assert decode_command(serializer, read.header) == ROUTE


def test_a_rocketmq_header_without_remark_and_fields_has_21_bytes() -> None:
    assert len(encode_command(Command(code=34, opaque=0), ROCKETMQ)) == 21


def test_the_flags_mark_responses_and_one_way_requests() -> None:
    assert Command(code=0, opaque=0, flag=FLAG_RESPONSE).is_response
    assert not Command(code=0, opaque=0, flag=FLAG_RESPONSE).is_oneway
    assert Command(code=0, opaque=0, flag=FLAG_ONEWAY).is_oneway


@pytest.mark.parametrize("remark", ["", ',"remark":""', ',"remark":null'])
def test_a_missing_a_null_and_an_empty_remark_are_the_same(remark: str) -> None:
    assert decode_command(JSON, b'{"code":1%s}' % remark.encode()).remark == ""


def test_scalars_become_text_and_nulls_vanish() -> None:
    header = (
        b'{"code":1,"extFields":{"d":4,"k":true,"m":false,"f":1.50,"s":"x","n":null,"o":{"a":[]}}}'
    )
    assert decode_command(JSON, header).ext_fields == {
        "d": "4",
        "k": "true",
        "m": "false",
        "f": "1.50",
        "s": "x",
        "o": '{"a":[]}',
    }


@pytest.mark.parametrize("language", ['"KLINGON"', "null", "9", "{}"])
def test_an_unknown_language_is_other(language: str) -> None:
    header = b'{"code":1,"language":%s}' % language.encode()
    assert decode_command(JSON, header).language is Language.OTHER


def test_an_unknown_code_is_kept() -> None:
    assert decode_command(JSON, b'{"code":987654}').code == 987654


@pytest.mark.parametrize("opaque", [-(2**31), -1, 0, 2**31 - 1])
def test_opaque_is_any_signed_32_bit_number(opaque: int) -> None:
    command = Command(code=1, opaque=opaque)
    for serializer in (JSON, ROCKETMQ):
        assert decode_command(serializer, encode_command(command, serializer)).opaque == opaque


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"code":null}',
        b'{"code":true}',
        b'{"code":"x"}',
        b'{"code":1.5}',
        b'{"code":2147483648}',
        b'{"code":1,"opaque":2147483648}',
        b'{"code":1,"opaque":-2147483649}',
        b'{"code":1,"flag":1e99}',
        b'{"code":1,"extFields":[]}',
        b'{"code":1,"extFields":"x"}',
        b'{"code":1,"remark":"\xff"}',
        b'{"code":1,"x":"\xff"}',
        b'{"code":1,"remark":"\\ud800"}',
        b'{"code":1} x',
        b'{"code":1,"x":' + b"[" * 100_000,
        b'{"code":' + b"9" * 10_000 + b"}",
    ],
)
def test_a_broken_json_header_is_refused(header: bytes) -> None:
    with pytest.raises(BrokenHeader, match=r"JSON header: ."):
        decode_command(JSON, header)


FIXED = "0069 03 01df 00000001 00000000"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "0069 03 01df 00000001 000000",
        FIXED,
        FIXED + "00000001",
        FIXED + "ffffffff 00000000",
        FIXED + "00000000 00000001",
        FIXED + "00000000 00000000 00",
        FIXED + "00000001 ff 00000000",
        FIXED + "00000000 00000001 00",
        FIXED + "00000000 00000002 0001",
        FIXED + "00000000 00000003 0001 61",
        FIXED + "00000000 00000007 0001 61 00000001",
        FIXED + "00000000 00000007 0001 61 ffffffff",
        FIXED + "00000000 00000007 ffff 61 00000000",
        FIXED + "00000000 00000007 0001 61 fffffff9",  # would lead back to the beginning
        FIXED + "00000000 00000008 0001 ff 00000001 61",
        FIXED + "00000000 00000008 0001 61 00000001 ff",
    ],
)
def test_a_broken_rocketmq_header_is_refused(header: str) -> None:
    with pytest.raises(BrokenHeader, match=r"ROCKETMQ header: ."):
        decode_command(ROCKETMQ, bytes.fromhex(header))


def test_an_empty_value_survives_json_but_not_rocketmq() -> None:
    command = Command(code=35, opaque=1, ext_fields={"consumerGroup": "", "producerGroup": "p"})
    assert decode_command(JSON, encode_command(command, JSON)) == command
    without = Command(code=35, opaque=1, ext_fields={"producerGroup": "p"})
    assert encode_command(command, ROCKETMQ) == encode_command(without, ROCKETMQ)
    read = decode_command(ROCKETMQ, encode_command(command, ROCKETMQ))
    assert read.ext_fields == {"producerGroup": "p"}


def test_an_empty_value_from_a_peer_is_skipped_in_rocketmq() -> None:
    header = bytes.fromhex(FIXED + "00000000 0000000f 0001 61 00000000 0001 62 00000001 63")
    assert decode_command(ROCKETMQ, header).ext_fields == {"b": "c"}


@pytest.mark.parametrize(
    ("code", "cut"),
    [
        (RequestCode.POP_MESSAGE, 3442),
        (RequestCode.ACK_MESSAGE, 3443),
        (RequestCode.CHANGE_MESSAGE_INVISIBLETIME, 3445),
    ],
)
def test_codes_of_pop_do_not_fit_rocketmq(code: int, cut: int) -> None:
    with pytest.raises(LocalProtocolError, match=str(int(code))):
        encode_command(Command(code=code, opaque=1), ROCKETMQ)
    assert code & 0xFFFF == cut
    header = encode_command(Command(code=cut, opaque=1), ROCKETMQ)
    assert decode_command(ROCKETMQ, header).code == cut


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_text_that_is_not_unicode_is_a_local_error(serializer: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_command(Command(code=1, opaque=1, remark="\ud800"), serializer)


def test_a_key_too_long_for_rocketmq_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        encode_command(Command(code=1, opaque=1, ext_fields={"k" * 32_768: "v"}), ROCKETMQ)
