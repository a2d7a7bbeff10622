"""The words for a cluster, and the file."""

from pathlib import Path

import pytest

from hardware_profiles.cluster.build import build_cluster, describe
from hardware_profiles.cluster.catalogue import find_accelerator, match_node
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Figure
from hardware_profiles.errors import InputError


@pytest.mark.parametrize(
    ("text", "num_nodes", "gpus_per_node", "name", "domains"),
    [
        ("8xA100-80GB", 1, 8, "A100-SXM-80GB", [8]),
        ("1xH100-SXM", 1, 1, "H100-SXM-80GB", [1]),
        (" 8 x a100_80g ", 1, 8, "A100-SXM-80GB", [8]),
        ("8XA100-80GB", 1, 8, "A100-SXM-80GB", [8]),
        ("16x8xH100-SXM", 16, 8, "H100-SXM-80GB", [8, 128]),
        ("2x4xA100-SXM-40GB", 2, 4, "A100-SXM-40GB", [4, 8]),
        ("1x16xH100-SXM", 1, 16, "H100-SXM-80GB", [16]),
        ("A100-80GB:8", 1, 8, "A100-SXM-80GB", [8]),
        ("A100:80GB:8", 1, 8, "A100-SXM-80GB", [8]),
        ("32xp5.48xlarge", 32, 8, "H100-SXM-80GB", [8, 256]),
        ("p5.48xlarge", 1, 8, "H100-SXM-80GB", [8]),
        ("gb200-nvl72", 18, 4, "GB200-186GB", [72]),
        ("2xgb200-nvl72", 36, 4, "GB200-186GB", [72, 144]),
        ("72xGB200", 18, 4, "GB200-186GB", [72]),
        ("20x4xGB200", 20, 4, "GB200-186GB", [40, 80]),  # as many in each rack
        ("64x4xGB200", 64, 4, "GB200-186GB", [64, 256]),
        ("19x4xGB200", 19, 4, "GB200-186GB", [72, 76]),  # no equal parts
        ("16xV100-SXM3-32GB", 1, 16, "V100-SXM3-32GB", [16]),
        ("256xTPU-v5e", 64, 4, "TPU-v5e", [256]),
        ("8xH100", 1, 8, "H100-SXM-80GB", [8]),
        ("8xA100", 1, 8, "A100-SXM-80GB", [8]),
        ("1x4090", 1, 1, "RTX-4090", [1]),
        ("2x8x4090", 2, 8, "RTX-4090", [8, 16]),
        ("4090:8", 1, 8, "RTX-4090", [8]),
        ("4090x8", 1, 8, "RTX-4090", [8]),
        ("16xRTX-4090-48GB", 2, 8, "RTX-4090-48GB", [8, 16]),
        ("16xL40S", 2, 8, "L40S", [8, 16]),
        ("16xH100-SXM", 2, 8, "H100-SXM-80GB", [8, 16]),
        ("64xH100-SXM", 8, 8, "H100-SXM-80GB", [8, 64]),
        ("256xH800", 32, 8, "H800-SXM-80GB", [8, 256]),
        ("144xGB200", 36, 4, "GB200-186GB", [72, 144]),
        ("16384x8xH100-SXM", 16384, 8, "H100-SXM-80GB", [8, 131072]),
    ],
)
def test_good_words(text, num_nodes, gpus_per_node, name, domains):
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.gpus_per_node) == (num_nodes, gpus_per_node)
    assert cluster.accelerator.name == name
    assert [tier.domain_size for tier in cluster.tiers] == domains
    assert cluster.name == text.strip()


BAD = {
    "": "a cluster is expected",
    "8x": "is no cluster",
    "x8": "is no cluster",
    "8": "is no cluster",
    "x": "is no cluster",
    "8x8": "is no cluster",
    "A100-80GB": "how many",
    "0xA100-80GB": "0 must be a whole number",
    "0x8xA100-80GB": "0 must be a whole number",
    "8x0xA100-80GB": "0 must be a whole number",
    "-8xA100-80GB": "-8 must be a whole number",
    "3.5xA100-80GB": "3.5 must be a whole number",
    "1,000xA100-80GB": "1,000 must be a whole number",
    "A100-80GB:0": "0 must be a whole number",
    "A100-80GB:-1": "-1 must be a whole number",
    "9999999xA100-80GB": "must be a whole number from 1 to 1,000,000",
    "9" * 5000 + "xA100-80GB": "must be a whole number from 1 to 1,000,000",
    "1000x1001xA100-80GB": "1,001,000 accelerators are too many",
    "1000000xp5.48xlarge": "8,000,000 accelerators are too many",
    "2x2x8xA100-80GB": "is no cluster",
    "8xA100-80GB!": "is no cluster",
    "8xA100-80GB junk": "no such accelerator",
    "8xA100-80GB,8xH100-SXM": "is no cluster",
    "8xA100-80GB\0": "is no cluster",
    "8xfoo": "foo: no such accelerator",
    "8xV100": "V100-SXM2-16GB, V100-SXM2-32GB",
    "12xH100-SXM": "Write 2x6xH100-SXM for 2 nodes, or 1x12xH100-SXM",
    "100xH100-SXM": "Full nodes: 12x8xH100-SXM (96) or 13x8xH100-SXM (104)",
    "4090": "Write 1x4090 for one, 8x4090 for a node of 8",
    "8H100": "write 8xH100",
    "v5p-64": "write 32xTPU-v5p",
    "tpu-v6e-8": "write 8xTPU-v6e",
    "8xcpu": "here:8 stands for eight processes",
    "2xStrix-Halo": "Strix-Halo: it is not priced",
    "8xRTX-4090-480GB": "RTX-4090-480GB: no such accelerator",
    "8xA100-60GB": "Did you mean A100-SXM-80GB",
    "4xA100-80GB+4xH100": "two kinds in one cluster are not priced",
    "1x4060Ti": "Did you mean RTX-4060-Ti-16GB or RTX-4060-Ti-8GB?",
    "1x1050Ti": "`shardplan hardware` lists them",
    "73xGB200": "Write 73x1xGB200 for 73 nodes, or 1x73xGB200",
    "2x8xp5.48xlarge": "says already that a node holds 8",
    "here:0": "whole number from 1",
    "here:-1": "whole number from 1",
    "here:x": "whole number from 1",
    "here:": "whole number from 1",
    "here:99999999999999": "whole number from 1",
    "nope.toml": "no such file",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:24])
def test_bad_words_are_one_clear_error(text):
    with pytest.raises(InputError) as error:
        parse_cluster(text)
    assert BAD[text] in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "2x8xA100-80GB",
            "2 nodes of 8 A100-SXM-80GB, NVLink3 300 GB/s inside, 25 GB/s per GPU between nodes",
        ),
        ("1xL4", "1 node of 1 L4"),
        (
            "2xgb200-nvl72",
            "36 nodes of 4 GB200-186GB, NVLink5 900 GB/s inside domains of 72, "
            "50 GB/s per GPU between domains",
        ),
    ],
)
def test_describe(text, words):
    assert describe(parse_cluster(text)) == words


def test_assumptions_are_noted():
    assert any("DGX-A100-80GB" in note for note in parse_cluster("2x8xA100-80GB").notes)
    assert parse_cluster("8xA100-SXM-80GB").notes == ()
    assert parse_cluster("2xp5.48xlarge").notes == ()
    split, network = parse_cluster("16xL40S").notes
    assert split == "16xL40S is taken as 2 nodes of 8, as usual"
    assert "server-8xL40S" in network
    assert parse_cluster("72xGB200").notes[1:] == ()  # one domain: nothing is open
    assert "is taken as H100-SXM-80GB" in parse_cluster("8xH100").notes[0]
    assert any("reach all 16" in note for note in parse_cluster("1x16xH100-SXM").notes)


def test_build_cluster_with_another_network():
    figure = Figure(12.5e9, "published", "the paper")
    cluster = build_cluster(
        find_accelerator("A100-SXM-80GB"), num_nodes=4, gpus_per_node=8, network_bandwidth=figure
    )
    assert cluster.tiers[1].bandwidth == figure
    assert cluster.notes == ()
    assert cluster.name == "4x8xA100-SXM-80GB"
    node = match_node("jean-zay-a100")
    assert node is not None
    other = build_cluster(cluster.accelerator, num_nodes=2, gpus_per_node=8, node=node.entry)
    assert other.tiers[1].name == "Omni-Path"


FILE = """
nodes = 4
gpus_per_node = 8
accelerator = "A100-SXM-80GB"
"""
OWN = """
nodes = 2
gpus_per_node = 4
[accelerator]
name = "X1"
device = "gpu"
architecture = "X"
memory_capacity = { value = 64e9, kind = "datasheet", source = "X1 data sheet" }
memory_bandwidth = { value = 2e12, kind = "datasheet", source = "X1 data sheet" }
peak_flops = [{ bf16 = 5e14, kind = "datasheet", source = "X1 data sheet" }]
link = "XLink"
link_bandwidth = { value = 1e11, kind = "datasheet", source = "X1 data sheet" }
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return parse_cluster(str(path))


def test_file_with_a_known_accelerator(tmp_path):
    cluster = read(tmp_path, FILE)
    usual = parse_cluster("4x8xA100-SXM-80GB")
    assert cluster.tiers == usual.tiers
    assert cluster.notes == usual.notes


def test_file_with_links_of_its_own(tmp_path):
    text = FILE + "[link]\nbandwidth = 2e11\nlatency = 2e-6\nname = 'cut'\nsource = 'us'\n"
    text += "[network]\nbandwidth = 1e10\nkind = 'measured'\nsource = 'nccl-tests'\n"
    cluster = read(tmp_path, text)
    inner, outer = cluster.tiers
    assert (inner.name, inner.bandwidth) == ("cut", Figure(2e11, "assumed", "us"))
    assert inner.latency == Figure(2e-6, "assumed", "us")
    assert outer.bandwidth == Figure(1e10, "measured", "nccl-tests")
    assert outer.latency.value == 14e-6
    assert cluster.notes == ()


def test_file_with_a_link_only_notes_the_network(tmp_path):
    cluster = read(tmp_path, FILE + "[link]\nbandwidth = 2e11\n")
    assert cluster.tiers[0].bandwidth.value == 2e11
    assert cluster.tiers[1].bandwidth.value == 25e9
    assert any("as in DGX-A100-80GB" in note for note in cluster.notes)


def test_file_with_an_accelerator_of_its_own(tmp_path):
    cluster = read(tmp_path, OWN + "[network]\nbandwidth = 1e10\n")
    assert cluster.accelerator.peak_flops["bf16"] == Figure(5e14, "datasheet", "X1 data sheet")
    assert [tier.bandwidth.value for tier in cluster.tiers] == [1e11, 1e10]
    one = read(tmp_path, OWN.replace("nodes = 2", "nodes = 1"))
    assert len(one.tiers) == 1


def test_the_example_of_a_card_of_ones_own_has_every_figure():
    cluster = parse_cluster(str(Path(__file__).parents[3] / "examples" / "own_accelerator.toml"))
    own = cluster.accelerator
    assert (cluster.num_nodes, cluster.gpus_per_node, own.name) == (2, 4, "X1")
    assert [tier.name for tier in cluster.tiers] == ["XLink", "network"]
    assert own.achievable_flops["bf16"] == Figure(390e12, "measured", "best of large torch.mm")
    assert own.price == Figure(1.5, "assumed", "our cloud")
    missing = [name for name in own.__slots__ if getattr(own, name) is None]
    measured_by_calibrate = ["kernel_launch", "score_seconds", "core_share"]
    none_of_these = ["host_memory_bandwidth", "power_limit", "l2_cache", "systolic_array"]
    assert missing == [*none_of_these, *measured_by_calibrate]


def test_the_share_of_a_link_is_at_most_all_of_it(tmp_path):
    share = 'link_share = { value = 0.6, kind = "measured", source = "nccl-tests" }\n'
    own = OWN + share + "[network]\nbandwidth = 1e10\n"
    figure = read(tmp_path, own).accelerator.link_share
    assert figure == Figure(0.6, "measured", "nccl-tests")
    with pytest.raises(InputError, match=r"link_share: value = 6(\.0)? \(must be .* to 1\)"):
        read(tmp_path, own.replace("0.6", "6.0"))


def test_an_unknown_host_without_peer_to_peer_is_noted_until_a_file_describes_it(tmp_path):
    note = "PCIe4 at 5.9 of 31 GB/s: collectives without peer-to-peer, on an unknown host"
    assert any(one.startswith(note) for one in parse_cluster("2xRTX-3090").notes)
    for name in ("1xRTX-3090", "2xRTX-A6000", "2x1xRTX-3090"):
        assert not any("peer-to-peer" in one for one in parse_cluster(name).notes)
    cards = 'nodes = 1\ngpus_per_node = 2\naccelerator = "RTX-3090"\n[link]\n'
    for link in ("bus_bandwidth = 4e9", 'name = "NVLink3"\nbandwidth = 56e9'):
        assert not read(tmp_path, cards + link).notes
    with pytest.raises(InputError, match=r"link: bus_bandwidth = 4.*\(must be at most the link's"):
        read(tmp_path, cards + "bus_bandwidth = 40e9")


def test_file_with_a_domain_over_nodes(tmp_path):
    cluster = read(tmp_path, FILE + "[link]\ndomain_size = 16\n")
    assert [tier.domain_size for tier in cluster.tiers] == [16, 32]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 4\n", "gpus_per_node is missing"),
        (FILE.replace("nodes = 4", "nodes = 0"), "nodes = 0"),
        (FILE.replace("nodes = 4", "nodes = 4.5"), "nodes = 4.5"),
        (FILE.replace("nodes = 4", "nodes = true"), "nodes = true"),
        (FILE.replace("nodes = 4", "nodes = 1000000"), "8,000,000 accelerators"),
        (FILE.replace("A100-SXM-80GB", "V100"), "names several"),
        (FILE.replace('"A100-SXM-80GB"', "7"), "accelerator = 7"),
        (FILE + "node = 3\n", "unknown key 'node'. Did you mean nodes?"),
        (FILE + "[network]\nbandwith = 1e9\n", "unknown key 'bandwith'"),
        (FILE + "[network]\nbandwidth = -1\n", "bandwidth = -1"),
        (FILE + "[network]\nbandwidth = 0\n", "bandwidth = 0"),
        (FILE + "[network]\nbandwidth = nan\n", "bandwidth = NaN"),
        (FILE + "[network]\nbandwidth = inf\n", "bandwidth = Infinity"),
        (FILE + "[network]\nbandwidth = '25 GB/s'\n", "bandwidth ="),
        (FILE + "[network]\nbandwidth = 1e9\nkind = 'guessed'\n", "measured, published"),
        (FILE + "[link]\ndomain_size = 2\n", "domain_size = 2"),
        ("network = 3\n" + FILE, "network = 3"),
        ("nodes = = 4\n", "not TOML"),
        (OWN, "bandwidth is missing"),
        (OWN.replace("memory_bandwidth", "memory_bandwith"), "memory_bandwith"),
        (OWN.replace("peak_flops = [{ bf16 = 5e14,", "peak_flops = [{ bf17 = 5e14,"), "bf17"),
        (OWN.replace('device = "gpu"', 'device = "fpga"'), "fpga"),
        (OWN.replace("value = 64e9, ", ""), "value is missing"),
        (OWN.replace("peak_flops = [", "peak_flops = [3, "), "peak_flops[0] = 3"),
    ],
)
def test_bad_files(tmp_path, text, words):
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert words in str(error.value)
    assert "cluster.toml" in str(error.value) or "names several" in words


def test_a_folder_or_a_picture_is_no_cluster(tmp_path):
    folder = tmp_path / "a.toml"
    folder.mkdir()
    with pytest.raises(InputError, match="is a folder"):
        parse_cluster(str(folder))
    picture = tmp_path / "b.toml"
    picture.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InputError, match="not text"):
        parse_cluster(str(picture))


def test_four_boards_of_several_nodes_may_have_no_switch() -> None:
    def says(spec: str) -> bool:
        return any("HGX-H200-4GPU" in note for note in parse_cluster(spec).notes)

    assert says("2x4xH200-SXM")
    assert not says("4xH200-SXM")  # mostly half of a server of eight
    assert not says("2x8xH200-SXM")
    assert not says("2xHGX-H200-4GPU")
