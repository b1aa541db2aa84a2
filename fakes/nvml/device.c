/* Readings of one GPU. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "lib.h"

/* A call that copies a text of the GPU, or one of its numbers, out. */
#define TEXT_CALL(function, field) \
    nvmlReturn_t function(nvmlDevice_t device, char *text, unsigned int length) { \
        struct gpu gpu; \
        nvmlReturn_t code = enter_device(__func__, device, &gpu); \
        return code == NVML_SUCCESS ? copy_text(gpu.field, text, length) : code; \
    }
#define NUMBER_CALL(function, type, expression) \
    nvmlReturn_t function(nvmlDevice_t device, type *value) { \
        struct gpu gpu; \
        nvmlReturn_t code = enter_device(__func__, device, &gpu); \
        if (code == NVML_SUCCESS) *value = (type)(expression); \
        return code; \
    }

/* Energy grows with power since `energy_since_ms` (CLOCK_BOOTTIME), as the real counter does. */
static uint64_t energy_mj(const struct gpu *gpu) {
    double since_s = boottime_s() - (double)gpu->energy_since_ms / 1e3;
    return gpu->energy_base_mj + (since_s > 0 ? (uint64_t)(since_s * (double)gpu->power_mw) : 0);
}

TEXT_CALL(nvmlDeviceGetName, name)
TEXT_CALL(nvmlDeviceGetUUID, uuid)
TEXT_CALL(nvmlDeviceGetSerial, serial)
TEXT_CALL(nvmlDeviceGetBoardPartNumber, part_number)
TEXT_CALL(nvmlDeviceGetVbiosVersion, vbios)
NUMBER_CALL(nvmlDeviceGetMinorNumber, unsigned int, gpu.minor)
NUMBER_CALL(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, gpu.persistence_mode)
NUMBER_CALL(nvmlDeviceGetPowerUsage, unsigned int, gpu.power_mw)
NUMBER_CALL(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy_mj(&gpu))
NUMBER_CALL(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, gpu.clock_event_reasons)
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, gpu.pcie_generation)
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, gpu.pcie_width)
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, gpu.pcie_generation_max)
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, gpu.pcie_width_max)
NUMBER_CALL(nvmlDeviceGetPcieReplayCounter, unsigned int, gpu.pcie_replay)

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    const struct state *state = state_lock();
    *index = 0;
    for (int i = 0; i < state->gpu_count && strcmp(state->gpus[i].uuid, gpu.uuid); i++)
        *index += !state->gpus[i].vanished;
    state_unlock();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    struct gpu gpu;
    unsigned int function;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    memset(pci, 0, sizeof *pci);
    if (sscanf(gpu.pci, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function) != 4) return NVML_ERROR_UNKNOWN;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xFF, pci->device & 0x1F);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF,
             pci->device & 0x1F);
    pci->pciDeviceId = 0x233010DE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    memory->total = gpu.memory_total_bytes;
    memory->used = gpu.memory_used_bytes;
    memory->free = gpu.memory_total_bytes - gpu.memory_used_bytes;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = gpu.memory_total_bytes;
    memory->reserved = 0;
    memory->used = gpu.memory_used_bytes;
    memory->free = gpu.memory_total_bytes - gpu.memory_used_bytes;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *now, nvmlEnableState_t *pending) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code == NVML_SUCCESS) *now = *pending = (nvmlEnableState_t)gpu.ecc_mode;
    return code;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code == NVML_SUCCESS) *now = *pending = (unsigned int)gpu.mig_mode;
    return code;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *value) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    *value = (unsigned int)gpu.temperature_c;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensorType != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    temperature->temperature = (int)gpu.temperature_c;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    utilization->gpu = (unsigned int)gpu.gpu_utilization;
    utilization->memory = (unsigned int)gpu.memory_utilization;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    *clock = (unsigned int)(type == NVML_CLOCK_MEM ? gpu.memory_clock_mhz : gpu.sm_clock_mhz);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *count) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (!gpu.ecc_mode) return NVML_ERROR_NOT_SUPPORTED;
    bool sram = location == NVML_MEMORY_LOCATION_SRAM, unc = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
    if (!sram && location != NVML_MEMORY_LOCATION_DRAM) return NVML_ERROR_NOT_SUPPORTED;
    uint64_t volatile_count = sram ? (unc ? gpu.vol_sram_unc : gpu.vol_sram_cor) : unc ? gpu.vol_dram_unc : gpu.vol_dram_cor;
    uint64_t aggregate = sram ? (unc ? gpu.agg_sram_unc : gpu.agg_sram_cor) : unc ? gpu.agg_dram_unc : gpu.agg_dram_cor;
    *count = counter == NVML_VOLATILE_ECC ? volatile_count : aggregate;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *count) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (!gpu.ecc_mode) return NVML_ERROR_NOT_SUPPORTED;
    bool unc = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
    if (counter == NVML_VOLATILE_ECC) *count = unc ? gpu.vol_dram_unc + gpu.vol_sram_unc : gpu.vol_dram_cor + gpu.vol_sram_cor;
    else *count = unc ? gpu.agg_dram_unc + gpu.agg_sram_unc : gpu.agg_dram_cor + gpu.agg_sram_cor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *cor, unsigned int *unc, unsigned int *pending,
                                       unsigned int *failure) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (gpu.mig_mode) return NVML_ERROR_NOT_SUPPORTED;
    *cor = (unsigned int)gpu.remap_cor;
    *unc = (unsigned int)gpu.remap_unc;
    *pending = (unsigned int)gpu.remap_pending;
    *failure = (unsigned int)gpu.remap_failure;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (status->version != nvmlEccSramErrorStatus_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (!gpu.ecc_mode) return NVML_ERROR_NOT_SUPPORTED;
    *status = (nvmlEccSramErrorStatus_t){.version = nvmlEccSramErrorStatus_v1,
                                         .aggregateUncSecDed = gpu.agg_sram_unc,
                                         .aggregateCor = gpu.agg_sram_cor,
                                         .volatileUncSecDed = gpu.vol_sram_unc,
                                         .volatileCor = gpu.vol_sram_cor,
                                         .aggregateUncBucketSm = gpu.agg_sram_unc,
                                         .bThresholdExceeded = (unsigned int)gpu.sram_threshold};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, nvmlUnrepairableMemoryStatus_v1_t *status) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    /* Headers disagree whether a version comes before the flag; drivers of both kinds can be played. */
    ((unsigned int *)status)[gpu.unrepairable_versioned ? 1 : 0] = (unsigned int)gpu.unrepairable;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (link >= gpu.nvlinks) return NVML_ERROR_INVALID_ARGUMENT;
    *active = gpu.nvlink_down_mask >> link & 1 ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    /* v2 is v3 without its last field, so the common head serves both. */
    if (info->version != nvmlGpuFabricInfo_v2 && info->version != nvmlGpuFabricInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memset(info->clusterUuid, 0, sizeof info->clusterUuid);
    for (size_t i = 0; i < sizeof info->clusterUuid; i++) {
        unsigned int byte;
        if (sscanf(gpu.cluster_uuid + 2 * i, "%2x", &byte) != 1) break;
        info->clusterUuid[i] = (unsigned char)byte;
    }
    info->status = NVML_SUCCESS;
    info->cliqueId = (unsigned int)gpu.clique_id;
    info->state = (nvmlGpuFabricState_t)gpu.fabric_state;
    info->healthMask = 0;
    if (info->version == nvmlGpuFabricInfo_v3) info->healthSummary = 0;
    return NVML_SUCCESS;
}

static void set_uint(nvmlFieldValue_t *value, uint64_t number) {
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    value->value.uiVal = (unsigned int)number;
}

static void set_ull(nvmlFieldValue_t *value, uint64_t number) {
    value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    value->value.ullVal = number;
}

static nvmlReturn_t set_ecc(nvmlFieldValue_t *value, const struct gpu *gpu, uint64_t dram, uint64_t sram) {
    set_ull(value, dram + sram);
    return gpu->ecc_mode ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t set_remap(nvmlFieldValue_t *value, const struct gpu *gpu, uint64_t number) {
    set_uint(value, number);
    return gpu->mig_mode ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static nvmlReturn_t set_field(nvmlFieldValue_t *value, const struct gpu *gpu) {
    switch (value->fieldId) {
    case NVML_FI_DEV_ECC_SBE_VOL_TOTAL: return set_ecc(value, gpu, gpu->vol_dram_cor, gpu->vol_sram_cor);
    case NVML_FI_DEV_ECC_DBE_VOL_TOTAL: return set_ecc(value, gpu, gpu->vol_dram_unc, gpu->vol_sram_unc);
    case NVML_FI_DEV_ECC_SBE_AGG_TOTAL: return set_ecc(value, gpu, gpu->agg_dram_cor, gpu->agg_sram_cor);
    case NVML_FI_DEV_ECC_DBE_AGG_TOTAL: return set_ecc(value, gpu, gpu->agg_dram_unc, gpu->agg_sram_unc);
    case NVML_FI_DEV_REMAPPED_COR: return set_remap(value, gpu, gpu->remap_cor);
    case NVML_FI_DEV_REMAPPED_UNC: return set_remap(value, gpu, gpu->remap_unc);
    case NVML_FI_DEV_REMAPPED_PENDING: return set_remap(value, gpu, gpu->remap_pending);
    case NVML_FI_DEV_REMAPPED_FAILURE: return set_remap(value, gpu, gpu->remap_failure);
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: set_uint(value, gpu->recovery_action); return NVML_SUCCESS;
    case NVML_FI_DEV_MEMORY_TEMP: set_uint(value, gpu->memory_temperature_c); return NVML_SUCCESS;
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: set_ull(value, energy_mj(gpu)); return NVML_SUCCESS;
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT: set_uint(value, gpu->power_mw); return NVML_SUCCESS;
    case NVML_FI_DEV_PCIE_REPLAY_COUNTER: set_uint(value, gpu->pcie_replay); return NVML_SUCCESS;
    case NVML_FI_DEV_NVLINK_LINK_COUNT: set_uint(value, gpu->nvlinks); return NVML_SUCCESS;
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    struct gpu gpu;
    struct timespec now;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].nvmlReturn = set_field(&values[i], &gpu);
    }
    const struct state *state = state_lock();
    for (int i = 0; i < count; i++)
        for (int u = 0; u < state->unsupported_count; u++)
            if (values[i].fieldId == state->unsupported[u]) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    state_unlock();
    return NVML_SUCCESS;
}
