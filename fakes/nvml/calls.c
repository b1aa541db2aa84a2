/* What every call does first: rules of the state file, initialisation, handles. And the calls without a GPU. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "lib.h"

enum { MAX_HANDLES = 4096, BLOCK_TICK_MS = 20 };

static pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct nvmlDevice_st handles[MAX_HANDLES];
static int handle_count;
static int initialised;            /* how often nvmlInit succeeded without shutdown; under the state's mutex */
static uint64_t initialised_load;  /* driver load that was initialised */

double boottime_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static const struct rule *rule_for(const struct state *state, int kind, const char *function, const char *uuid) {
    for (int i = 0; i < state->rule_count; i++) {
        const struct rule *rule = &state->rules[i];
        if ((int)rule->kind != kind || (strcmp(rule->function, "all") && strcmp(rule->function, function))) continue;
        if (!rule->uuid[0] || (uuid && !strcmp(rule->uuid, uuid))) return rule;
    }
    return NULL;
}

/* Block as a stuck driver would: until the rule's time is over or the rule is taken out of the file. */
static void block(const char *function, const char *uuid) {
    double since_s = boottime_s();
    for (;;) {
        const struct rule *rule = rule_for(state_lock(), RULE_BLOCK, function, uuid);
        bool over = !rule || boottime_s() - since_s >= rule->seconds;
        state_unlock();
        if (over) return;
        nanosleep(&(struct timespec){.tv_nsec = BLOCK_TICK_MS * 1000000L}, NULL);
    }
}

/* On success the state is locked and *locked says what it is. */
static nvmlReturn_t begin(const char *function, const char *uuid, const struct state **locked) {
    block(function, uuid);
    const struct state *state = state_lock();
    const struct rule *rule = rule_for(state, RULE_FAIL, function, uuid);
    if (rule) {
        int code = rule->code;
        state_unlock();
        return (nvmlReturn_t)code;
    }
    *locked = state;
    return NVML_SUCCESS;
}

static nvmlReturn_t check_driver(const struct state *state) {
    if (!initialised) return NVML_ERROR_UNINITIALIZED;
    if (state->driver != DRIVER_LOADED) return NVML_ERROR_DRIVER_NOT_LOADED;
    /* The driver was reloaded behind our back: nothing works until shutdown and init. */
    return state->driver_load == initialised_load ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

nvmlReturn_t enter_uninitialised(const char *function) {
    const struct state *state;
    nvmlReturn_t code = begin(function, NULL, &state);
    if (code == NVML_SUCCESS) state_unlock();
    return code;
}

nvmlReturn_t enter(const char *function) {
    const struct state *state;
    nvmlReturn_t code = begin(function, NULL, &state);
    if (code != NVML_SUCCESS) return code;
    code = check_driver(state);
    state_unlock();
    return code;
}

nvmlReturn_t resolve(const struct state *state, nvmlDevice_t device, const struct gpu **gpu) {
    if (device < handles || device >= handles + MAX_HANDLES) return NVML_ERROR_INVALID_ARGUMENT;
    if (device->driver_load != state->driver_load) return NVML_ERROR_GPU_IS_LOST;
    for (int i = 0; i < state->gpu_count; i++) {
        const struct gpu *found = &state->gpus[i];
        if (strcmp(found->uuid, device->uuid)) continue;
        if (found->lost || found->vanished || found->handle_epoch != device->handle_epoch) break;
        *gpu = found;
        return NVML_SUCCESS;
    }
    return NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t enter_device(const char *function, nvmlDevice_t device, struct gpu *gpu) {
    const struct state *state;
    const struct gpu *found;
    if (device < handles || device >= handles + MAX_HANDLES) return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t code = begin(function, device->uuid, &state);
    if (code != NVML_SUCCESS) return code;
    code = check_driver(state);
    if (code == NVML_SUCCESS) code = resolve(state, device, &found);
    if (code == NVML_SUCCESS) *gpu = *found;
    state_unlock();
    return code;
}

nvmlReturn_t handle_for(const struct state *state, const struct gpu *gpu, nvmlDevice_t *device) {
    nvmlReturn_t code = NVML_SUCCESS;
    pthread_mutex_lock(&handles_mutex);
    int i = 0;
    while (i < handle_count && (strcmp(handles[i].uuid, gpu->uuid) || handles[i].handle_epoch != gpu->handle_epoch ||
                                handles[i].driver_load != state->driver_load))
        i++;
    if (i == MAX_HANDLES) {
        code = NVML_ERROR_MEMORY;
    } else {
        if (i == handle_count) {
            strcpy(handles[i].uuid, gpu->uuid);
            handles[i].handle_epoch = gpu->handle_epoch;
            handles[i].driver_load = state->driver_load;
            handle_count++;
        }
        *device = &handles[i];
    }
    pthread_mutex_unlock(&handles_mutex);
    return code;
}

nvmlReturn_t copy_text(const char *text, char *to, unsigned int length) {
    if (!to) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    const struct state *state;
    nvmlReturn_t code = begin("nvmlInitWithFlags", NULL, &state);
    if (code != NVML_SUCCESS) return code;
    if (state->driver == DRIVER_ABSENT) code = NVML_ERROR_DRIVER_NOT_LOADED;
    else if (state->driver == DRIVER_MISMATCH) code = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    else {
        if (!initialised) initialised_load = state->driver_load;
        initialised++;
    }
    state_unlock();
    return code;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    const struct state *state;
    nvmlReturn_t code = begin("nvmlShutdown", NULL, &state);
    if (code != NVML_SUCCESS) return code;
    if (initialised) initialised--;
    else code = NVML_ERROR_UNINITIALIZED;
    state_unlock();
    return code;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    static _Thread_local char text[TEXT];
    snprintf(text, sizeof text, "fake nvml error %d", (int)result);
    return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    nvmlReturn_t code = enter(__func__);
    if (code != NVML_SUCCESS) return code;
    code = copy_text(state_lock()->driver_version, version, length);
    state_unlock();
    return code;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    nvmlReturn_t code = enter_uninitialised(__func__);
    if (code != NVML_SUCCESS) return code;
    code = copy_text(state_lock()->nvml_version, version, length);
    state_unlock();
    return code;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t code = enter_uninitialised(__func__);
    if (code != NVML_SUCCESS) return code;
    *version = (int)state_lock()->cuda_version;
    state_unlock();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t code = enter(__func__);
    if (code != NVML_SUCCESS) return code;
    const struct state *state = state_lock();
    *count = 0;
    for (int i = 0; i < state->gpu_count; i++) *count += !state->gpus[i].vanished;
    state_unlock();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t code = enter(__func__);
    if (code != NVML_SUCCESS) return code;
    const struct state *state = state_lock();
    code = NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < state->gpu_count; i++) {
        const struct gpu *gpu = &state->gpus[i];
        if (gpu->vanished || index--) continue;
        code = gpu->lost ? NVML_ERROR_GPU_IS_LOST : handle_for(state, gpu, device);
        break;
    }
    state_unlock();
    return code;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    const struct state *state;
    nvmlReturn_t code = begin(__func__, uuid, &state);
    if (code != NVML_SUCCESS) return code;
    code = check_driver(state);
    if (code == NVML_SUCCESS) {
        code = NVML_ERROR_NOT_FOUND;
        for (int i = 0; i < state->gpu_count; i++) {
            const struct gpu *gpu = &state->gpus[i];
            if (!gpu->vanished && !gpu->lost && !strcmp(gpu->uuid, uuid)) code = handle_for(state, gpu, device);
        }
    }
    state_unlock();
    return code;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    unsigned int domain = 0, bus = 0, slot = 0, function = 0, d, b, s, f;
    nvmlReturn_t code = enter(__func__);
    if (code != NVML_SUCCESS) return code;
    if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) return NVML_ERROR_INVALID_ARGUMENT;
    const struct state *state = state_lock();
    code = NVML_ERROR_NOT_FOUND;
    for (int i = 0; i < state->gpu_count; i++) {
        const struct gpu *gpu = &state->gpus[i];
        if (gpu->vanished || sscanf(gpu->pci, "%x:%x:%x.%x", &d, &b, &s, &f) != 4) continue;
        if (d == domain && b == bus && s == slot && f == function)
            code = gpu->lost ? NVML_ERROR_GPU_IS_LOST : handle_for(state, gpu, device);
    }
    state_unlock();
    return code;
}
