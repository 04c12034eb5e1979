"""A command, and the two encodings of its header.

JSON:  {"code":105,"language":"PYTHON","version":479,"opaque":1,"flag":0,
        "serializeTypeCurrentRPC":"JSON",
        "remark":"...","extFields":{"topic":"TBW102"}}        remark and extFields only if not empty

ROCKETMQ, all integers big-endian and signed:

    code 2 | language 1 | version 2 | opaque 4 | flag 4
    | remark length 4 | remark | fields length 4 | fields

    fields:  key length 2 | key | value length 4 | value      repeated

Decoding is lenient: every value in extFields becomes text (numbers and booleans as they were
written), null values are skipped, unknown keys and languages are ignored. Encoding is strict: the
values in extFields are JSON strings, because C++ clients skip everything else.

ROCKETMQ cannot express an empty value, because Java reads a length of zero as null. Empty keys and
values are neither written nor read there. It cannot express codes above 32,767 either: encoding one
raises an error, and POP_MESSAGE (200050) from a peer that cuts it to 16 bits is read as 3442.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from escrowmq.errors import BrokenHeader, LocalProtocolError
from escrowmq.parsing import Int32
from escrowmq.remoting.codes import FLAG_ONEWAY, FLAG_RESPONSE, JSON, VERSION, Language

INT32_MAX: Final = 2**31 - 1
JSON_NAME: Final = "JSON"  # of the serializer, in a JSON header

_FIXED = struct.Struct(">hbhii")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_LANGUAGES = {language.name: language for language in Language}
_LANGUAGE_CODES = {language.value: language for language in Language}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a request or a response, independent of its encoding."""

    code: int
    opaque: int
    language: Language = Language.PYTHON
    version: int = VERSION
    flag: int = 0
    remark: str = ""
    ext_fields: dict[str, str] = {}

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


class _EncodedHeader(msgspec.Struct, rename="camel", omit_defaults=True):
    """The header in the form that is written. Only remark and extFields are omitted if empty."""

    code: int
    language: str
    version: int
    opaque: int
    flag: int
    # It repeats what the frame says. Java writes it, and the Rust client cannot do without it.
    serializer_name: str = msgspec.field(name="serializeTypeCurrentRPC")
    remark: str = ""
    ext_fields: dict[str, str] = {}


class _StrictHeader(msgspec.Struct, kw_only=True, rename="camel"):
    """The header in the form that most peers write: its extFields are strings."""

    code: Int32
    language: str | None = None
    version: Int32 = 0
    opaque: Int32 = 0
    flag: Int32 = 0
    remark: str | None = None
    ext_fields: dict[str, str] | None = None


class _LenientHeader(msgspec.Struct, kw_only=True, rename="camel"):
    """The header in the form that all peers write: its extFields may be any JSON values."""

    code: Int32
    language: msgspec.Raw = msgspec.Raw(b"null")
    version: Int32 = 0
    opaque: Int32 = 0
    flag: Int32 = 0
    remark: msgspec.Raw = msgspec.Raw(b"null")
    ext_fields: dict[str, msgspec.Raw] | None = None


FIELDS_MAX: Final = 1_000  # no request has more than a few dozen

_decode_strict = msgspec.json.Decoder(_StrictHeader, strict=False).decode
_decode_lenient = msgspec.json.Decoder(_LenientHeader, strict=False).decode
_decode_text = msgspec.json.Decoder(str).decode


def decode_command(serializer: int, header: bytes) -> Command:
    """Return the decoded header. Raises BrokenHeader, whatever is wrong with it."""
    return _decode_json(header) if serializer == JSON else _decode_rocketmq(header)


def encode_command(command: Command, serializer: int = JSON) -> bytes:
    """Return the encoded header. Raises LocalProtocolError if the encoding cannot express it."""
    return _encode_json(command) if serializer == JSON else _encode_rocketmq(command)


# --- JSON ----------------------------------------------------------------------------------------


def _decode_json(header: bytes) -> Command:
    try:
        text = header.decode()
        try:
            return _from_strict(_decode_strict(text))
        except msgspec.ValidationError:
            return _from_lenient(_decode_lenient(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenHeader(f"JSON header: {error}") from error


def _from_strict(header: _StrictHeader) -> Command:
    return Command(
        code=header.code,
        language=_LANGUAGES.get(header.language or "", Language.OTHER),
        version=header.version,
        opaque=header.opaque,
        flag=header.flag,
        remark=header.remark or "",
        ext_fields=header.ext_fields or {},
    )


def _from_lenient(header: _LenientHeader) -> Command:
    texts = {name: _raw_to_text(raw) for name, raw in (header.ext_fields or {}).items()}
    return Command(
        code=header.code,
        language=_LANGUAGES.get(_raw_to_text(header.language) or "", Language.OTHER),
        version=header.version,
        opaque=header.opaque,
        flag=header.flag,
        remark=_raw_to_text(header.remark) or "",
        ext_fields={name: text for name, text in texts.items() if text is not None},
    )


def _raw_to_text(raw: msgspec.Raw) -> str | None:
    """Return the text of a JSON string, None for null, and any other value as it was written."""
    written = bytes(raw)
    if written.startswith(b'"'):
        return _decode_text(written)
    return None if written == b"null" else written.decode()


def _encode_json(command: Command) -> bytes:
    try:
        return msgspec.json.encode(
            _EncodedHeader(
                command.code,
                command.language.name,
                command.version,
                command.opaque,
                command.flag,
                JSON_NAME,
                command.remark,
                command.ext_fields,
            )
        )
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"code {command.code}: not valid text: {error}") from error


# --- ROCKETMQ ------------------------------------------------------------------------------------


def _decode_rocketmq(header: bytes) -> Command:
    try:
        code, language, version, opaque, flag = _FIXED.unpack_from(header)
        remark, position = _read_sized(header, _FIXED.size, _INT, "remark")
        block, position = _read_sized(header, position, _INT, "extFields")
        if position != len(header):
            raise BrokenHeader(f"ROCKETMQ header: {len(header) - position} bytes too many")
        return Command(
            code=code,
            language=_LANGUAGE_CODES.get(language, Language.OTHER),
            version=version,
            opaque=opaque,
            flag=flag,
            remark=remark.decode(),
            ext_fields=_decode_fields(block),
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise BrokenHeader(f"ROCKETMQ header: {error}") from error


def _decode_fields(block: bytes) -> dict[str, str]:
    fields, position = {}, 0
    while position < len(block):
        key, position = _read_sized(block, position, _SHORT, "key")
        value, position = _read_sized(block, position, _INT, "value")
        if key and value:
            fields[key.decode()] = value.decode()
            if len(fields) > FIELDS_MAX:
                raise BrokenHeader(f"ROCKETMQ header: more than {FIELDS_MAX} extFields")
    return fields


def _read_sized(
    data: bytes, position: int, length_format: struct.Struct, field_name: str
) -> tuple[bytes, int]:
    """Return a value with its length before it, and the position behind it."""
    (length,) = length_format.unpack_from(data, position)
    begin = position + length_format.size
    end = begin + length
    if length < 0 or end > len(data):
        raise BrokenHeader(
            f"ROCKETMQ header: {field_name} has {length} bytes, {len(data) - begin} remain"
        )
    return data[begin:end], end


def _encode_rocketmq(command: Command) -> bytes:
    try:
        remark = command.remark.encode()
        pieces: list[bytes] = []
        for key, value in command.ext_fields.items():
            if key and value:
                name, text = key.encode(), value.encode()
                pieces += (_SHORT.pack(len(name)), name, _INT.pack(len(text)), text)
        block = b"".join(pieces)
        fixed = _FIXED.pack(
            command.code, command.language, command.version, command.opaque, command.flag
        )
    except (struct.error, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"ROCKETMQ cannot express a header with code {command.code}: {error}"
        ) from error
    return b"".join((fixed, _INT.pack(len(remark)), remark, _INT.pack(len(block)), block))
