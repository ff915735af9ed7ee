"""Variables of ``srun``."""

from __future__ import annotations

from nest_megatron.integrations.process_variables import first_host, rank_variables

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_a_task_learns_its_rank() -> None:
    found = rank_variables(STEP)
    assert found.pop("MASTER_PORT") == str(15_000 + (4711 * 16 + 2) % 10_000)
    assert found == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu003",
    }


def test_what_the_script_exports_stays() -> None:
    assert rank_variables({**STEP, "RANK": "3"}) == {}
    assert rank_variables({**STEP, "MASTER_ADDR": "login"}).get("MASTER_ADDR") is None


def test_one_task_and_no_slurm_are_left_alone() -> None:
    assert rank_variables({}) == {}
    assert rank_variables({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_host_lists() -> None:
    assert first_host("dgx-a[01-02,07]n[1-2],other") == "dgx-a01n1"
    assert first_host("single") == "single"
    assert first_host("") == ""
