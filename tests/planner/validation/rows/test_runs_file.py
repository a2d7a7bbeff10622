"""RUNS.csv: every value is read with its type, and what is wrong is named with row and column."""

from pathlib import Path

import pytest

from hardware_profiles.errors import InputError
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import COLUMNS, MAX_ERRORS, PUBLISHED, Row, read_runs


def written(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def test_values_have_types_and_empty_cells_are_none(tmp_path: Path) -> None:
    text = "row_id,seq_len,gated_mlp,step_time_s,gpu\na,2048.0,1,0.5,\n\nb,1,0,,A100-SXM\n"
    first, second = read_runs(written(tmp_path, text))
    assert first == Row(line=2, row_id="a", seq_len=2048, gated_mlp=True, step_time_s=0.5)
    assert second.get("step_time_s") is None
    assert second.words("gpu") == "a100-sxm"
    assert second.group == "runs"


@pytest.mark.parametrize("cell", ["-", "–", "N/A", "NA"])
def test_a_dash_is_an_empty_cell(tmp_path: Path, cell: str) -> None:
    text = f"seq_len,expert_parallel,recompute\n2048,{cell},{cell}\n"
    assert read_runs(written(tmp_path, text)) == [Row(line=2, seq_len=2048)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seq_len,VPP\n1,2\n", "unknown column 'VPP'. Did you mean virtual_stages?"),
        ("seq_len,iteration time (ms)\n1,2\n", "Did you mean step_time_s?"),
        (
            "seq_len,seqlen\n1,2\n",
            "unknown column 'seqlen'. Did you mean seq_len or target_seq_len?",
        ),
        ("seq_len,micro_num\n1,2\n", "unknown column 'micro_num'. Did you mean global_batch_size?"),
        ("seq_len,tok/s/GPU\n1,2\n", "Did you mean tokens_per_second_per_gpu?"),
        ("seq_len,seq_len\n1,2\n", "seq_len stands twice"),
        ("model\nx\n", "the column seq_len is missing"),
        ("", "is empty"),
        ("seq_len\n", "no rows"),
        ("seq_len,num_gpus\n1\n", "line 2: 1 cells for 2 columns"),
        ("seq_len\n2\nmany\n", "line 3, column seq_len: 'many' (must be a whole number"),
        ("seq_len\n0\n", "line 2, column seq_len: '0' (must be"),
        ("seq_len\n1.5\n", "column seq_len: '1.5' (must be a whole number"),
        ("seq_len,step_time_s\n1,nan\n", "column step_time_s: 'nan' (must be a number"),
        ("seq_len,gated_mlp\n1,2\n", "column gated_mlp: '2' (must be 1, 0 or empty)"),
        ("seq_len,model\n1," + "x" * 140_000, "line 2: not CSV: field larger than field limit"),
        ("seq_len,outcome\n1,died\n", "column outcome: 'died' (must be one of ok, oom, or empty)"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_runs(written(tmp_path, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_every_bad_cell_is_reported_at_once(tmp_path: Path) -> None:
    text = "row_id,seq_len,zero_stage,outcome\na,0,7,ok\nb,2\nb,many,1,died\nb,2,,\n"
    with pytest.raises(InputError) as error:
        read_runs(path := written(tmp_path, text))
    assert str(error.value).splitlines() == [
        f"{path}: 6 errors",
        "  line 2, column seq_len: '0' (must be a whole number from 1 to 1e+08, or empty)",
        "  line 2, column zero_stage: '7' (must be a whole number from 0 to 3, or empty)",
        "  line 3: 2 cells for 4 columns",
        "  line 4, column seq_len: 'many' (must be a whole number from 1 to 1e+08, or empty)",
        "  line 4, column outcome: 'died' (must be one of ok, oom, or empty)",
        "  line 5, column row_id: 'b' stands twice (first in line 4)",
    ]


def test_a_file_of_errors_is_cut_short(tmp_path: Path) -> None:
    text = "seq_len\n" + "0\n" * (MAX_ERRORS + 3)
    with pytest.raises(InputError) as error:
        read_runs(written(tmp_path, text))
    first, *cells, last = str(error.value).splitlines()
    assert first.endswith(f": {MAX_ERRORS + 3} errors")
    assert len(cells) == MAX_ERRORS
    assert last == "  and 3 more (--json lists them)"


def test_a_header_is_checked_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_runs(written(tmp_path, "seqlen,model,model\n1,2,3\n"))
    assert str(error.value).splitlines()[1:] == [
        "  unknown column 'seqlen'. Did you mean seq_len or target_seq_len?",
        "  the column model stands twice",
        "  the column seq_len is missing",
    ]


def test_short_words_name_their_columns_and_the_list_comes_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_runs(written(tmp_path, "seq_len,tp,cluster,zzzz,qqqq\n1,2,3,4,5\n"))
    tensor, cluster, first, second = str(error.value).splitlines()[1:]
    assert tensor == "  unknown column 'tp'. Did you mean tensor_parallel?"
    assert cluster.endswith("Did you mean gpu and num_gpus?")
    assert "Known: row_id, " in first
    assert second == "  unknown column 'qqqq'"


@pytest.mark.parametrize(("cell", "value"), [("yes", True), ("1.0", True), ("No", False)])
def test_flags_have_several_spellings(tmp_path: Path, cell: str, *, value: bool) -> None:
    (row,) = read_runs(written(tmp_path, f"seq_len,gated_mlp\n1,{cell}\n"))
    assert row.gated_mlp is value


@pytest.mark.parametrize(
    ("cell", "stage"), [("zero2", 2), ("ZeRO-3", 3), ("Z1", 1), ("zero_stage 2", 2), ("stage 3", 3)]
)
def test_a_stage_may_have_its_name(tmp_path: Path, cell: str, stage: int) -> None:
    (row,) = read_runs(written(tmp_path, f"seq_len,zero_stage\n2048,{cell}\n"))
    assert row.zero_stage == stage


@pytest.mark.parametrize(
    ("cell", "flag"),
    [
        *(("True", "1"), ("yes", "1"), ("no", "0"), ("fa2", "1"), ("sdpa", "1"), ("eager", "0")),
        *(("triton", "1"), ("TE", "1"), ("torch sdpa", "1"), ("splash", "1"), ("auto", "unknown")),
        *(("sdpa (math)", "0"), ("no flash", "0"), ("unfused", "0")),
    ],
)
def test_flash_attention_is_a_flag(tmp_path: Path, cell: str, flag: str) -> None:
    (row,) = read_runs(written(tmp_path, f"seq_len,flash_attention\n2048,{cell}\n"))
    assert row.flash_attention == flag


@pytest.mark.parametrize(
    ("cell", "share"), [("fa3", 1.0), ("FlashAttention-3", 1.0), ("fa2", 0.6), ("true", 0.6)]
)
def test_attention_by_name_says_which_cards_its_kernel_is_for(
    tmp_path: Path, cell: str, share: float
) -> None:
    cells = "framework,model,gpu,num_gpus,seq_len,flash_attention\nown loop,llama-2-7b,H100,8,2048,"
    (row,) = read_runs(written(tmp_path, f"{cells}{cell}\n"))
    assert case_of(row).scenario.software.kernels.flash_share_since_hopper == share


def test_the_published_runs_come_along() -> None:
    rows = read_runs(PUBLISHED)
    assert len(rows) == 2221
    assert len({row.name for row in rows}) == 2221
    assert len({row.group for row in rows}) == 28
    assert all(row.get("source") for row in rows)


def test_every_column_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "reference" / "validate.md").read_text()
    assert [name for name in COLUMNS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_may_be_written_as_spreadsheets_do(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    lines = [["Model", "Num GPUs", "Seq-Len"], ["a", "8", "4k"], ["b", "16", '"4,096"']]
    path.write_text("\ufeff" + "\r\n".join(mark.join(line) for line in lines))
    assert [(row.num_gpus, row.seq_len) for row in read_runs(path)] == [(8, 4096), (16, 4096)]
