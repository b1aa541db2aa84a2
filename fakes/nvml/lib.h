/* A fake libnvidia-ml.so.1: what the driver and its GPUs look like, as read from a state file.
 *
 * The state file (environment HEADWAY_FAKE_NVML_STATE) is text, one `key value` a line, replaced as a whole by rename.
 * Every NVML call looks whether it changed. See fakes/nvml_state.py, which writes it, for what each key means.
 */
#ifndef HEADWAY_FAKE_NVML_LIB_H
#define HEADWAY_FAKE_NVML_LIB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml.h"

#define STATE_VARIABLE "HEADWAY_FAKE_NVML_STATE"
enum { MAX_GPUS = 32, MAX_RULES = 64, MAX_EVENTS = 64, TEXT = 96, MAX_LINE = 512 };

struct gpu {
    char uuid[TEXT], name[TEXT], serial[TEXT], part_number[TEXT], vbios[TEXT], pci[TEXT], cluster_uuid[TEXT];
    uint64_t minor, lost, vanished, handle_epoch;
    uint64_t memory_total_bytes, memory_used_bytes;
    uint64_t ecc_mode, mig_mode, persistence_mode;
    uint64_t vol_dram_cor, vol_dram_unc, vol_sram_cor, vol_sram_unc;
    uint64_t agg_dram_cor, agg_dram_unc, agg_sram_cor, agg_sram_unc;
    uint64_t remap_cor, remap_unc, remap_pending, remap_failure;
    uint64_t sram_threshold, unrepairable, unrepairable_versioned, recovery_action;
    uint64_t temperature_c, memory_temperature_c, power_mw, energy_base_mj, energy_since_ms;
    uint64_t gpu_utilization, memory_utilization, sm_clock_mhz, memory_clock_mhz, clock_event_reasons;
    uint64_t pcie_generation, pcie_generation_max, pcie_width, pcie_width_max, pcie_replay;
    uint64_t nvlinks, nvlink_down_mask, fabric_state, clique_id;
};

/* What one function (or "all") does instead of answering: block for a while, or fail. Empty uuid: for every GPU. */
struct rule {
    enum { RULE_BLOCK, RULE_FAIL } kind;
    char function[TEXT], uuid[TEXT];
    double seconds;
    int code;
};

struct event {
    uint64_t seq, type, data;
    char uuid[TEXT];
};

enum driver { DRIVER_LOADED, DRIVER_ABSENT, DRIVER_MISMATCH };

struct state {
    bool readable;
    enum driver driver;
    uint64_t driver_load, cuda_version;
    char driver_version[TEXT], nvml_version[TEXT];
    int gpu_count, rule_count, event_count, unsupported_count;
    struct gpu gpus[MAX_GPUS];
    struct rule rules[MAX_RULES];
    struct event events[MAX_EVENTS];
    uint64_t unsupported[MAX_RULES];
};

/* A handle names a GPU by UUID, not a slot: after a swap or a reset that cut it off it answers GPU_IS_LOST. */
struct nvmlDevice_st {
    char uuid[TEXT];
    uint64_t handle_epoch, driver_load;
};

/* state.c */
const struct state *state_lock(void); /* the current state, newly read if the file changed; holds the mutex */
void state_unlock(void);
const char *state_directory(void); /* folder of the state file, or NULL */

/* calls.c: every exported function begins with one of these. `function` is the C name of the call. */
nvmlReturn_t enter_uninitialised(const char *function);
nvmlReturn_t enter(const char *function);                                             /* a call without a GPU */
nvmlReturn_t enter_device(const char *function, nvmlDevice_t device, struct gpu *gpu); /* copies the GPU out */
nvmlReturn_t resolve(const struct state *state, nvmlDevice_t device, const struct gpu **gpu);
nvmlReturn_t handle_for(const struct state *state, const struct gpu *gpu, nvmlDevice_t *device);
nvmlReturn_t copy_text(const char *text, char *to, unsigned int length);
double boottime_s(void);

#endif
