"""Settings: the sources, which of them wins, errors and warnings."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from escrowmq.cli.commands.config import example_lines, setting_json, setting_lines
from escrowmq.cli.commands.serve import role_warnings
from escrowmq.config import (
    SETTINGS,
    BrokerConfig,
    BrokerRole,
    Config,
    DelayConfig,
    FlushMode,
    NetworkConfig,
    Source,
    StoreConfig,
    load_config,
)
from escrowmq.config.properties_file import FileProperty, read_properties
from escrowmq.config.rocketmq_keys import OBSOLETE_KEYS, ROCKETMQ_KEYS
from escrowmq.config.settings import GROUPS
from escrowmq.errors import ConfigError

# What many a tutorial shows.
BROKER_CONF = """\
brokerClusterName = DefaultCluster
brokerName = broker-b
brokerId = 0
! old style
namesrvAddr=10.0.0.1:9876; 10.0.0.2:9876
deleteWhen = 04;16
fileReservedTime = 48\x20\x20
brokerRole = ASYNC_MASTER
flushDiskType = sync_flush
mapedFileSizeCommitLog=1073741824
storePathRootDir=/data/rocketmq/store
storePathConsumeQueue=/data/rocketmq/store/consumequeue
sendMessageThreadPoolNums=128
messageDelayLevel = 1s 90s \\
    2h 1d
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text(BROKER_CONF)
    return path


def written(tmp_path: Path, text: str | bytes, name: str = "broker.conf") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(file: Path | None = None, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, environment)
    return str(caught.value)


# --- which source wins ---------------------------------------------------------------------------


def test_without_sources_everything_has_its_default() -> None:
    resolved = load_config()
    assert resolved.config == Config()
    assert resolved.warnings == ()
    assert resolved.config.network.bind_address == "127.0.0.1"
    assert resolved.config.broker.advertised_address == "127.0.0.1"
    assert resolved.config.network.listen_port == 10911
    assert resolved.config.namesrv.namesrv_port == 9876
    assert resolved.config.store.root_dir == Path("escrowmq-data")
    assert {origin.source for origin in resolved.origins.values()} == {Source.DEFAULT}


def test_a_broker_conf_of_rocketmq_works(conf: Path) -> None:
    resolved = load_config(conf)
    config = resolved.config
    assert config.broker.broker_name == "broker-b"
    assert config.broker.namesrv_addresses == ("10.0.0.1:9876", "10.0.0.2:9876")
    assert config.store.delete_hours == (4, 16)
    assert config.store.reserved_hours == 48
    assert config.store.flush_mode is FlushMode.SYNC
    assert config.store.segment_bytes == 1 << 30
    assert config.store.root_dir == Path("/data/rocketmq/store")
    assert config.delay.delay_levels_ms == (1_000, 90_000, 7_200_000, 86_400_000)
    assert str(resolved.origins["messageDelayLevel"]) == f"{conf}:14"


def test_a_key_that_only_rocketmq_has_is_a_warning(conf: Path) -> None:
    assert load_config(conf).warnings == (
        f"{conf}:10: mapedFileSizeCommitLog is ignored, as in RocketMQ 4.9 and 5; "
        "did you mean mappedFileSizeCommitLog?",
        f"{conf}:12: storePathConsumeQueue is ignored, as in RocketMQ 4.9 and 5",
        f"{conf}:13: sendMessageThreadPoolNums is a setting of RocketMQ that EscrowMQ does not "
        "have; ignored",
    )


@pytest.mark.parametrize("key", ["aclEnable", "authenticationEnabled", "authorizationEnabled"])
def test_access_control_requires_a_file_of_accounts(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="escrowAclFile must name"):
        load_config(written(tmp_path, f"{key}=true"))
    config = load_config(written(tmp_path, f"{key}=true\nescrowAclFile=acl.yml")).config
    assert config.security.is_acl_on


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tls.server.mode=enforcing", "certPath must name"),
        ("tls.server.mode=strict", "must be DISABLED or PERMISSIVE or ENFORCING"),
        ("tls.server.certPath=a.pem", "certPath and tls.server.keyPath, or neither"),
        ("tls.server.need.client.auth=require", "trustCertPath must name"),
    ],
)
def test_incomplete_tls_settings_are_refused(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_config(written(tmp_path, text))


SECRET = "hush-hush-1234"


def test_a_secret_is_read_and_never_shown(tmp_path: Path) -> None:
    told = f'{{"accessKey":"broker-1","secretKey":"{SECRET}"}}'
    file = written(
        tmp_path,
        f"tls.server.keyPassword={SECRET}\ninnerClientAuthenticationCredentials={told}",
    )
    resolved = load_config(file)
    assert resolved.config.security.tls_key_password.reveal() == SECRET
    assert SECRET not in repr(resolved)
    for entry in resolved.entries():
        assert SECRET not in f"{setting_json(entry)}{entry!r}{entry.text}"
    assert SECRET not in "".join(setting_lines(resolved.entries()))


def test_the_error_of_a_secret_does_not_contain_it(tmp_path: Path) -> None:
    file = written(tmp_path, f"innerClientAuthenticationCredentials={SECRET}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert SECRET not in f"{caught.value!r}{caught.value}"
    environment = {
        "ESCROWMQ_INNER_CLIENT_AUTHENTICATION_CREDENTIALS": f'{{"secretKey":"{SECRET}"}}'
    }
    with pytest.raises(ConfigError) as caught:
        load_config(None, environment)
    assert SECRET not in str(caught.value)


def test_variables_of_clients_are_not_settings() -> None:
    environment = {"ESCROWMQ_ACCESS_KEY": "billing", "ESCROWMQ_SECRET_KEY": SECRET}
    assert load_config(None, environment).warnings == ()


def test_a_later_source_wins(conf: Path) -> None:
    environment = {"ESCROWMQ_BROKER_NAME": "from-environment", "ESCROWMQ_LISTEN_PORT": "1"}
    resolved = load_config(conf, environment, {"--port": "2", "--data": "here"})
    assert resolved.config.broker.broker_name == "from-environment"
    assert resolved.config.network.listen_port == 2
    assert resolved.config.store.root_dir == Path("here")
    assert resolved.config.broker.cluster_name == "DefaultCluster"
    places = {key: str(origin) for key, origin in resolved.origins.items()}
    assert places["brokerName"] == "ESCROWMQ_BROKER_NAME"
    assert places["listenPort"] == "--port"
    assert places["brokerClusterName"] == f"{conf}:1"
    assert places["maxMessageSize"] == "default"
    changed = {entry.setting.key for entry in resolved.entries() if entry.is_changed}
    assert {"brokerName", "listenPort", "storePathRootDir"} < changed
    assert "maxMessageSize" not in changed


def test_metrics_are_off_by_default(tmp_path: Path) -> None:
    assert not Config().metrics.is_enabled
    assert not load_config(written(tmp_path, "metricsPromExporterPort=1")).config.metrics.is_enabled
    prometheus = written(tmp_path, "metricsExporterType=prom\nmetricsPromExporterHost=0.0.0.0")
    metrics = load_config(prometheus).config.metrics
    assert (metrics.is_enabled, metrics.metrics_port) == (True, 5557)
    assert metrics.metrics_address == "0.0.0.0"
    environment = {"ESCROWMQ_METRICS_EXPORTER_TYPE": "PROM"}
    assert load_config(None, environment).config.metrics.is_enabled
    assert "only Prometheus is served" in refused(None, ESCROWMQ_METRICS_EXPORTER_TYPE="LOG")


def test_the_flag_for_metrics_wins_over_the_file(tmp_path: Path) -> None:
    off = written(tmp_path, "metricsExporterType=DISABLE\nmetricsPromExporterPort=1")
    resolved = load_config(off, {}, {"--metrics-port": "2"})
    assert (resolved.config.metrics.is_enabled, resolved.config.metrics.metrics_port) == (True, 2)
    assert str(resolved.origins["metricsExporterType"]) == "follows metricsPromExporterPort"
    on = written(tmp_path, "metricsExporterType=PROM")
    assert not load_config(on, {}, {"--metrics-port": "0"}).config.metrics.is_enabled


def test_a_repeated_key_has_its_last_value_and_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "listenPort=1\n\nlistenPort=2\n")
    resolved = load_config(path)
    assert resolved.config.network.listen_port == 2
    assert resolved.warnings == (
        f"{path}:3: listenPort is set a second time; {path}:1 has no effect",
    )


def test_an_empty_variable_is_not_set() -> None:
    assert load_config(None, {"ESCROWMQ_LISTEN_PORT": ""}).config == Config()


def test_an_unknown_variable_is_a_warning() -> None:
    environment = {"ESCROWMQ_SERVICE_HOST": "10.0.0.1", "ESCROWMQ_LISTN_PORT": "1", "HOME": "/"}
    resolved = load_config(None, environment)
    assert resolved.config == Config()
    assert resolved.warnings == (
        "ESCROWMQ_LISTN_PORT is not a setting of EscrowMQ; ignored; "
        "did you mean ESCROWMQ_LISTEN_PORT?",
        "ESCROWMQ_SERVICE_HOST is not a setting of EscrowMQ; ignored",
    )


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "flags", "bind", "told"),
    [
        ({"BROKER_IP1": "10.0.0.5"}, {}, "0.0.0.0", "10.0.0.5"),
        ({"BROKER_IP1": "fd00::5"}, {}, "::", "fd00::5"),
        ({"BROKER_IP1": "localhost"}, {}, "127.0.0.1", "localhost"),
        ({"BIND_ADDRESS": "10.0.0.5"}, {}, "10.0.0.5", "10.0.0.5"),
        ({"BIND_ADDRESS": "0.0.0.0"}, {}, "0.0.0.0", ""),
        ({"BIND_ADDRESS": "0.0.0.0", "BROKER_IP1": "10.0.0.5"}, {}, "0.0.0.0", "10.0.0.5"),
        ({"BROKER_IP1": "10.0.0.5"}, {"--host": "10.0.0.6"}, "10.0.0.6", "10.0.0.6"),
        ({"BROKER_IP1": "10.0.0.5"}, {"--host": "0.0.0.0"}, "0.0.0.0", "10.0.0.5"),
        ({}, {"--host": "::"}, "::", ""),
    ],
)
def test_an_address_that_is_not_set_follows_the_other(
    environment: dict[str, str], flags: dict[str, str], bind: str, told: str
) -> None:
    variables = {f"ESCROWMQ_{name}": value for name, value in environment.items()}
    config = load_config(None, variables, flags).config
    assert (config.network.bind_address, config.broker.advertised_address) == (bind, told)


def test_a_wildcard_address_is_not_advertised() -> None:
    assert "an address that clients can reach" in refused(ESCROWMQ_BROKER_IP1="0.0.0.0")


# --- what is refused -----------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = written(tmp_path, "# ours\nflushDisktyp=SYNC_FLUSH\n")
    said = refused(path)
    assert said == f"{path}:2: there is no setting 'flushDisktyp'; did you mean flushDiskType?"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("listenPort=65536", "listenPort='65536': must be a whole number from 0 to 65535"),
        ("listenPort=1_0", "listenPort='1_0': must be a whole number from 0 to 65535"),
        ("listenPort=", "listenPort='': must be a whole number from 0 to 65535"),
        ("listenPort=" + "9" * 5_000, "must be a whole number from 0 to 65535"),
        ("traceOn=yes", "traceOn='yes': must be true or false"),
        ("brokerName=", "brokerName='': must be 1 to 255 printable characters"),
        ("brokerName=a\\tb", r"brokerName='a\tb': must be 1 to 255 printable characters"),
        ("brokerRole=SLAVE", "EscrowMQ has no slaves; it must be ASYNC_MASTER or SYNC_MASTER"),
        ("brokerId=1", "brokerId='1': must be 0"),
        ("flushDiskType=NEVER", "must be ASYNC_FLUSH or SYNC_FLUSH"),
        ("deleteWhen=24", "must be one or more hours from 0 to 23, separated by ;"),
        ("deleteWhen=", "must be one or more hours from 0 to 23, separated by ;"),
        ("deleteWhen=04;x", "must be one or more hours from 0 to 23, separated by ;"),
        ("namesrvAddr=10.0.0.1", "must be one or more host:port, separated by ; or ,"),
        ("namesrvAddr=10.0.0.1:0", "must be one or more host:port, separated by ; or ,"),
        ("messageDelayLevel=1s 5x", "times such as 5s"),
        ("messageDelayLevel=", "times such as 5s"),
        ("storePathRootDir=~/store", "must not begin with ~"),
        ("storePathRootDir=", "must be a path"),
        ("bindAddress=a b", "an address of this machine"),
        ("brokerIP1=http://a", "an address that clients can reach"),
        ("brokerName=\\u12", "line 1: '\\\\u12' is not \\u and four hexadecimal digits"),
        ("brokerName=\\ud83d", "line 1: half of a \\uXXXX\\uXXXX pair is missing"),
        ("escrowConnectionInFlightBytesMax=999999999", "must not be more than"),
    ],
)
def test_an_invalid_value_is_refused_with_what_is_allowed(
    tmp_path: Path, line: str, said: str
) -> None:
    assert said in refused(written(tmp_path, line))


def test_the_error_names_the_origin_of_the_value(tmp_path: Path) -> None:
    path = written(tmp_path, "\n\nlistenPort: x\n")
    assert refused(path).startswith(f"{path}:3: listenPort='x': ")
    assert refused(ESCROWMQ_LISTEN_PORT="x").startswith("ESCROWMQ_LISTEN_PORT: listenPort='x': ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.conf")
    assert "cannot be read" in refused(tmp_path)
    assert "larger than 1048576 bytes" in refused(written(tmp_path, b"#" * ((1 << 20) + 1)))


def test_groups_check_their_values() -> None:
    with pytest.raises(ConfigError, match="listenPort=-1: must be a whole number"):
        NetworkConfig(listen_port=-1)
    with pytest.raises(ConfigError, match="mappedFileSizeConsumeQueue=19"):
        StoreConfig(queue_file_bytes=19)
    with pytest.raises(ConfigError, match="traceOn=1: must be true or false"):
        BrokerConfig(trace_on=1)  # type: ignore[arg-type]  # that is the point


def test_the_size_of_a_queue_file_is_rounded_up_to_whole_entries() -> None:
    config = load_config(None, {"ESCROWMQ_MAPPED_FILE_SIZE_CONSUME_QUEUE": "90001"}).config
    assert config.store.queue_file_bytes == 90_020


def test_sync_master_is_a_warning() -> None:
    resolved = load_config(None, {"ESCROWMQ_BROKER_ROLE": "SYNC_MASTER"})
    assert resolved.config.broker.broker_role is BrokerRole.SYNC_MASTER
    assert resolved.warnings == (
        "ESCROWMQ_BROKER_ROLE: brokerRole=SYNC_MASTER has no effect: there is no replication",
    )


def test_a_name_server_with_listen_port_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "listenPort=9999")
    (warning,) = role_warnings(load_config(path), "namesrv")
    assert (
        warning == f"{path}:1: listenPort is the port of the broker; "
        "the name server has escrowNamesrvPort"
    )
    assert role_warnings(load_config(path), "all") == []
    assert role_warnings(load_config(path, {}, {"--namesrv-port": "1"}), "namesrv") == []
    assert role_warnings(load_config(), "namesrv") == []


# --- TOML ----------------------------------------------------------------------------------------


def test_toml_accepts_keys_and_names_flat_and_in_tables(tmp_path: Path) -> None:
    text = """
brokerName = "broker-t"
trace_on = false

[broker]
namesrvAddr = ["a:1", "b:2"]

[store]
delete_hours = [4, 16]
"segment_bytes" = 1_048_576

[delay]
messageDelayLevel = ["1s", "2m"]
"""
    path = written(tmp_path, text, "broker.toml")
    resolved = load_config(path)
    config = resolved.config
    assert config.broker.broker_name == "broker-t"
    assert config.broker.trace_on is False
    assert config.broker.namesrv_addresses == ("a:1", "b:2")
    assert config.store.delete_hours == (4, 16)
    assert config.store.segment_bytes == 1 << 20
    assert config.delay.delay_levels_ms == (1_000, 120_000)
    assert str(resolved.origins["namesrvAddr"]) == f"{path}:6"
    assert str(resolved.origins["mappedFileSizeCommitLog"]) == f"{path}:10"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listenPort =", "broker.toml: Invalid value"),
        ("listenPort = 1.5", "broker.toml:1: listenPort='1.5': must be a whole number"),
        ("listenPort = [1]", "broker.toml:1: listenPort must be a whole number"),
        ("listenPort = 1979-05-27", "broker.toml:1: listenPort must be a whole number"),
        ("namesrvAddr = [1.5]", "broker.toml:1: namesrvAddr must be one or more host:port"),
        ("listen_prt = 1", "there is no setting 'listen_prt'; did you mean listen_port?"),
        ("[namesrv]\nlistenPort = 1", "toml:2: listenPort belongs in [network], not [namesrv]"),
        ("[brokr]\n", "there is no table ['brokr']; the tables are [broker], [network]"),
        ("a = " + "[" * 5_000, "broker.toml: "),
        ("a = " + "1" * 5_000, "broker.toml: "),
    ],
)
def test_invalid_toml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(written(tmp_path, text, "broker.toml"))


def test_toml_with_key_and_name_of_a_setting_has_the_last_and_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, "listenPort = 1\nlisten_port = 2\nhaListenPort = 3\n", "b.toml")
    resolved = load_config(path)
    assert resolved.config.network.listen_port == 2
    again, replicas = resolved.warnings
    assert again == f"{path}:2: listenPort is set a second time; {path}:1 has no effect"
    assert "there is no replication" in replicas


# --- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a=b", [("a", "b", 1)]),
        ("  a : b ", [("a", "b ", 1)]),
        ("a b=c", [("a", "b=c", 1)]),
        ("a", [("a", "", 1)]),
        ("a=b#c", [("a", "b#c", 1)]),
        ("#a=b\n !c=d\n\n \t\n", []),
        ("# not continued \\\na=b", [("a", "b", 2)]),
        ("a=b\\\n   #c\nd=e", [("a", "b#c", 1), ("d", "e", 3)]),
        ("a=b\\\\\nc=d", [("a", "b\\", 1), ("c", "d", 2)]),
        ("a=b\\\n\nc=d", [("a", "b", 1), ("c", "d", 3)]),
        ("a=b\r\nc=d\re=f", [("a", "b", 1), ("c", "d", 2), ("e", "f", 3)]),
        (r"a\=b\:c\ d=e\q\t", [("a=b:c d", "eq\t", 1)]),
        (r"a=\u4e2d\ud83d\ude00", [("a", "中😀", 1)]),
        ("a=b\\", [("a", "b", 1)]),
        ("\\", []),
    ],
)
def test_properties_are_read_as_java_reads_them(
    text: str, pairs: list[tuple[str, str, int]]
) -> None:
    expected = [FileProperty(key=key, value=value, line=line) for key, value, line in pairs]
    assert list(read_properties(text)) == expected


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "latin-1"])
def test_a_file_may_be_in_utf_8_or_latin_1(tmp_path: Path, coding: str) -> None:
    path = written(tmp_path, "# für alle\nbrokerName=Köln\n".encode(coding))
    assert load_config(path).config.broker.broker_name == "Köln"


# --- the catalogue -------------------------------------------------------------------------------


def test_names_of_settings_are_unique() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.environment_variable for setting in SETTINGS}) == len(SETTINGS)
    assert [item.name for item in fields(Config)] == list(GROUPS)


def test_keys_are_rocketmqs_or_begin_with_escrow() -> None:
    assert {s.key for s in SETTINGS if not s.is_escrowmq_only} <= ROCKETMQ_KEYS
    assert not {s.key for s in SETTINGS if s.is_escrowmq_only} & ROCKETMQ_KEYS
    assert not OBSOLETE_KEYS & ROCKETMQ_KEYS
    assert len(ROCKETMQ_KEYS) > 500


def test_help_is_a_sentence() -> None:
    assert [s.key for s in SETTINGS if not re.fullmatch(r"[A-Z0-9].*[^.]\.", s.help)] == []


def test_the_uncommented_example_has_the_defaults(tmp_path: Path) -> None:
    lines = list(example_lines())
    assert load_config(written(tmp_path, "\n".join(lines))).config == Config()
    bare = "\n".join(re.sub(r"^#(?=\w)", "", line) for line in lines)
    resolved = load_config(written(tmp_path, bare))
    assert resolved.config == Config()
    assert Source.DEFAULT not in {origin.source for origin in resolved.origins.values()}


# --- derived values ------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision_ms", "interval_s"), [(1, 0.001), (50, 0.05), (1000, 0.1)])
def test_the_tick_is_as_short_as_the_precision_of_timers_requires(
    precision_ms: int, interval_s: float
) -> None:
    assert DelayConfig(timer_precision_ms=precision_ms).tick_interval_s == interval_s


def test_the_largest_record_fits_into_a_segment() -> None:
    assert StoreConfig(segment_bytes=4096, message_bytes_max=1_000).record_bytes_max == 4088
