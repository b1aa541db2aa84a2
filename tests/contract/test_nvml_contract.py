"""What the agent relies on in NVML, held against the fake library and, where there is a GPU, against the real one.

Each library is looked at in a process of its own, through the real binding: this file run as a script.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.nvml.build import BuildError, build
from fakes.nvml_state import STATE_VARIABLE, FakeNode, FakeNvml, NvmlReturn, RecoveryAction, gb200, h100

FIELDS = (3, 4, 5, 6, 142, 143, 144, 145, 230, 82, 83, 185, 186, 94)
COUNTERS = (3, 4, 5, 6, 142, 143, 83, 94)
NOT_SUPPORTED, NO_PERMISSION = 3, 4
UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, TIMEOUT, GPU_IS_LOST = 1, 2, 6, 10, 15
FAKE_NODES: dict[str, Callable[[], FakeNode]] = {
    "fake-h100": lambda: h100("contract"),
    "fake-gb200": lambda: gb200("c"),
}


def probe(library: str) -> dict[str, Any]:
    """Everything the tests look at, as plain values. Errors appear as {"error": nvmlReturn_t}."""
    import pynvml as nvml

    def attempt(name: str, *arguments: Any, say: Callable[[Any], Any] = lambda value: value) -> Any:
        try:
            return say(getattr(nvml, name)(*arguments))
        except nvml.NVMLError as error:
            return {"error": error.value}

    def fields(handle: Any) -> dict[int, Any]:
        members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
        return {
            one.fieldId: getattr(one.value, members[one.valueType])
            if one.nvmlReturn == 0
            else {"error": one.nvmlReturn}
            for one in nvml.nvmlDeviceGetFieldValues(handle, list(FIELDS))
        }

    def gpu(index: int) -> dict[str, Any]:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        bus_id = pci.busId if isinstance(pci.busId, str) else pci.busId.decode()
        sram = nvml.c_nvmlEccSramErrorStatus_v1_t()
        fabric = nvml.c_nvmlGpuFabricInfo_v3_t()
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        found = {
            "uuid": uuid,
            "by_uuid": nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(uuid.encode())),
            "by_pci": nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())),
            "index": nvml.nvmlDeviceGetIndex(handle),
            "bus_id": bus_id,
            "pci": [pci.domain, pci.bus, pci.device],
            "minor": nvml.nvmlDeviceGetMinorNumber(handle),
            "name": nvml.nvmlDeviceGetName(handle),
            "vbios": nvml.nvmlDeviceGetVbiosVersion(handle),
            "serial": attempt("nvmlDeviceGetSerial", handle),
            "part_number": attempt("nvmlDeviceGetBoardPartNumber", handle),
            "memory": [memory.total, memory.used, memory.free],
            "temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "temperature_v": attempt("nvmlDeviceGetTemperatureV", handle, nvml.NVML_TEMPERATURE_GPU),
            "utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "sm_clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "reasons": nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "pcie": [nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)],
            "pcie_max": [nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)],
            "ecc_mode": attempt("nvmlDeviceGetEccMode", handle),
            "mig_mode": attempt("nvmlDeviceGetMigMode", handle),
            "remapped": attempt("nvmlDeviceGetRemappedRows", handle),
            "sram": attempt("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(sram)),
            "sram_threshold": sram.bThresholdExceeded,
            "dram_uncorrected": attempt("nvmlDeviceGetMemoryErrorCounter", handle, 1, 1, 2),
            "uncorrected": attempt("nvmlDeviceGetTotalEccErrors", handle, 1, 1),
            "power_mw": attempt("nvmlDeviceGetPowerUsage", handle),
            "nvlink": attempt("nvmlDeviceGetNvLinkState", handle, 0),
            "fabric": attempt("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(fabric)),
            "fabric_state": fabric.state,
            "event_types": nvml.nvmlDeviceGetSupportedEventTypes(handle),
            "fields": fields(handle),
        }
        time.sleep(0.12)
        return {**found, "later": fields(handle)}

    before = attempt("nvmlDeviceGetCount") if library else None
    if library:
        nvml.nvmlLib = ctypes.CDLL(library)
        before = attempt("nvmlDeviceGetCount")
    nvml.nvmlInit()
    nvml.nvmlInit()
    nvml.nvmlShutdown()  # counted: the first init still holds
    count = nvml.nvmlDeviceGetCount()
    gpus = [gpu(index) for index in range(count)]
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), gpus[0]["event_types"] & 0x8, events)
    began_s = time.monotonic()
    waited = attempt("nvmlEventSetWait_v2", events, 200)
    waited_s = time.monotonic() - began_s
    nvml.nvmlEventSetFree(events)
    result = {
        "before_init": before,
        "driver_version": nvml.nvmlSystemGetDriverVersion(),
        "nvml_version": nvml.nvmlSystemGetNVMLVersion(),
        "cuda_version": nvml.nvmlSystemGetCudaDriverVersion_v2(),
        "gpus": gpus,
        "beyond": attempt("nvmlDeviceGetHandleByIndex", count),
        "unknown_uuid": attempt("nvmlDeviceGetHandleByUUID", b"GPU-00000000-0000-0000-0000-000000000000"),
        "waited": waited,
        "waited_s": waited_s,
    }
    nvml.nvmlShutdown()
    return {**result, "after_shutdown": attempt("nvmlDeviceGetCount")}


def run_probe(library: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, library],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["fake-h100", "fake-gb200", pytest.param("real", marks=pytest.mark.gpu)])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "real":
        if not Path("/dev/nvidiactl").exists():
            pytest.skip("no NVIDIA driver on this machine (/dev/nvidiactl)")
        return run_probe("", {})
    fake = FakeNvml(tmp_path_factory.mktemp("nvml") / "nvml.state")
    fake.create(FAKE_NODES[request.param]())
    return run_probe(str(request.getfixturevalue("library")), {STATE_VARIABLE: str(fake.path)})


def test_life_of_the_library(seen: dict[str, Any]) -> None:
    assert seen["before_init"] in (None, {"error": UNINITIALIZED})
    assert seen["after_shutdown"] == {"error": UNINITIALIZED}
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", seen["driver_version"])
    assert seen["nvml_version"].split(".", 1)[1].startswith(seen["driver_version"].split(".")[0])
    assert seen["cuda_version"] >= 12000


def test_every_gpu_is_found_by_index_uuid_and_address(seen: dict[str, Any]) -> None:
    assert seen["gpus"]
    assert len({gpu["uuid"] for gpu in seen["gpus"]}) == len(seen["gpus"])
    for index, gpu in enumerate(seen["gpus"]):
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu["uuid"])
        assert gpu["by_uuid"] == gpu["by_pci"] == gpu["uuid"]
        assert gpu["index"] == index
        assert gpu["bus_id"].upper() == "{:08X}:{:02X}:{:02X}.0".format(*gpu["pci"])


def test_identity(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        assert gpu["name"].startswith("NVIDIA ")
        assert gpu["vbios"]
        assert gpu["minor"] >= 0
        assert gpu["serial"]
        assert gpu["part_number"]


def test_load_and_link_have_sane_values(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        total, used, free = gpu["memory"]
        assert total > 2**30
        assert 0 <= used <= total
        assert free <= total
        assert 0 < gpu["temperature"] < 120
        assert abs(gpu["temperature_v"] - gpu["temperature"]) <= 3
        assert 0 <= gpu["utilization"] <= 100
        assert gpu["reasons"] >= 0
        assert 0 < gpu["sm_clock"] < 5000
        assert gpu["pcie"][0] <= gpu["pcie_max"][0]
        assert gpu["pcie"][1] <= gpu["pcie_max"][1]


def test_one_call_gives_all_fields_and_each_says_whether_it_is_known(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        assert {int(field) for field in gpu["fields"]} == set(FIELDS)
        for value in gpu["fields"].values():
            assert not isinstance(value, dict) or value["error"] in (NOT_SUPPORTED, NO_PERMISSION)
        action = gpu["fields"]["230"]
        assert isinstance(action, dict) or 0 <= action <= 7


def test_counters_do_not_fall_and_energy_rises(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        for field in COUNTERS:
            before, later = gpu["fields"][str(field)], gpu["later"][str(field)]
            if not isinstance(before, dict):
                assert later >= before
        if not isinstance(gpu["fields"]["83"], dict):
            assert gpu["later"]["83"] > gpu["fields"]["83"]


def test_fields_agree_with_the_calls_of_their_own(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        if isinstance(gpu["remapped"], list):
            assert gpu["remapped"] == [gpu["fields"][field] for field in ("142", "143", "144", "145")]
        if not isinstance(gpu["uncorrected"], dict):
            assert gpu["uncorrected"] == gpu["fields"]["6"]
            assert gpu["fields"]["6"] >= gpu["fields"]["4"], "aggregate counts hold the volatile ones"


def test_versioned_structs_are_filled_by_reference(seen: dict[str, Any]) -> None:
    for gpu in seen["gpus"]:
        assert gpu["sram"] == 0 or gpu["sram"]["error"] in (NOT_SUPPORTED, NO_PERMISSION)
        assert gpu["sram_threshold"] in (0, 1)
        assert gpu["fabric"] == 0 or gpu["fabric"]["error"] == NOT_SUPPORTED
        assert gpu["fabric_state"] in (0, 1, 2, 3)


def test_events(seen: dict[str, Any]) -> None:
    assert all(gpu["event_types"] & 0x8 for gpu in seen["gpus"]), "XIDs as events"
    assert seen["waited"] == {"error": TIMEOUT}
    assert 0.15 <= seen["waited_s"] < 2


def test_refusals(seen: dict[str, Any]) -> None:
    assert seen["beyond"] == {"error": INVALID_ARGUMENT}
    assert seen["unknown_uuid"] == {"error": NOT_FOUND}


def test_faults_of_the_fake_look_as_the_driver_shows_them(library: Path, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml.state")
    node = h100("faults", gpus=3)
    node.gpus[0].ecc_error(corrected=7, uncorrected=2, location="sram")
    node.gpus[0].remap_row(failed=True)
    node.require(node.gpus[1], RecoveryAction.DRAIN_AND_RESET)
    node.gpus[2].mig_mode = 1
    node.unsupported = [82]
    node.fail("nvmlDeviceGetSramEccErrorStatus", NvmlReturn.NO_PERMISSION, node.gpus[1])
    fake.create(node)
    gpus = run_probe(str(library), {STATE_VARIABLE: str(fake.path)})["gpus"]
    assert [gpus[0]["fields"][field] for field in ("3", "4", "5", "6")] == [7, 2, 7, 2]
    assert gpus[0]["dram_uncorrected"] == 0, "the errors were in SRAM"
    assert gpus[0]["remapped"] == [0, 1, 1, 1]
    assert [gpu["fields"]["230"] for gpu in gpus] == [0, 4, 0]
    assert gpus[2]["remapped"] == {"error": NOT_SUPPORTED}, "not offered while MIG is on"
    assert [gpu["fields"]["82"] for gpu in gpus] == [{"error": NOT_SUPPORTED}] * 3
    assert [gpu["sram"] for gpu in gpus] == [0, {"error": NO_PERMISSION}, 0]


def test_a_second_build_is_the_first(library: Path) -> None:
    stamp_ns = library.stat().st_mtime_ns
    assert build() == library
    assert library.stat().st_mtime_ns == stamp_ns


def test_without_a_compiler_ziglang_serves_or_is_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fakes.nvml.build", "--out", str(tmp_path)],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if importlib.util.find_spec("ziglang"):
        assert Path(done.stdout.strip()).is_file(), done.stderr
    else:
        assert done.returncode == 1
        assert "pip install ziglang" in done.stderr


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
