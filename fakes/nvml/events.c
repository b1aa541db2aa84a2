/* Event sets. Events that were written before a GPU was registered are lost, as with the real driver. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#include "lib.h"

#define SUPPORTED_TYPES \
    (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError | \
     nvmlEventMigConfigChange | nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent | \
     nvmlEventTypeDramRetirementFailure | nvmlEventTypeNonFatalPoisonError | nvmlEventTypeFatalPoisonError | \
     nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)
enum { POLL_WITHOUT_INOTIFY_MS = 100 };

struct registration {
    nvmlDevice_t device;
    uint64_t types, after_seq;
};

struct nvmlEventSet_st {
    int inotify; /* -1: none to be had, poll instead */
    int count;
    struct registration registered[MAX_GPUS];
};

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t code = enter(__func__);
    if (code != NVML_SUCCESS) return code;
    struct nvmlEventSet_st *made = calloc(1, sizeof *made);
    if (!made) return NVML_ERROR_MEMORY;
    made->inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (made->inotify >= 0 && inotify_add_watch(made->inotify, state_directory(), IN_MOVED_TO | IN_CLOSE_WRITE) < 0) {
        close(made->inotify);
        made->inotify = -1;
    }
    *set = made;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t code = enter_uninitialised(__func__);
    if (code != NVML_SUCCESS) return code;
    if (set->inotify >= 0) close(set->inotify);
    free(set);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code == NVML_SUCCESS) *types = SUPPORTED_TYPES;
    return code;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    struct gpu gpu;
    nvmlReturn_t code = enter_device(__func__, device, &gpu);
    if (code != NVML_SUCCESS) return code;
    if (types & ~(unsigned long long)SUPPORTED_TYPES) return NVML_ERROR_NOT_SUPPORTED;
    if (set->count == MAX_GPUS) return NVML_ERROR_INSUFFICIENT_SIZE;
    struct registration *registration = &set->registered[set->count++];
    *registration = (struct registration){.device = device, .types = types};
    const struct state *state = state_lock();
    for (int i = 0; i < state->event_count; i++)
        if (state->events[i].seq > registration->after_seq) registration->after_seq = state->events[i].seq;
    state_unlock();
    return NVML_SUCCESS;
}

/* The oldest event not yet given to this set; GPU_IS_LOST (which does not say whose) when one of its GPUs is lost. */
static nvmlReturn_t next_event(const struct state *state, nvmlEventSet_t set, nvmlEventData_t *data) {
    const struct event *oldest = NULL;
    struct registration *of = NULL;
    nvmlReturn_t code = NVML_ERROR_TIMEOUT;
    for (int r = 0; r < set->count; r++) {
        struct registration *registration = &set->registered[r];
        const struct gpu *gpu;
        if (resolve(state, registration->device, &gpu) != NVML_SUCCESS) code = NVML_ERROR_GPU_IS_LOST;
        for (int i = 0; i < state->event_count; i++) {
            const struct event *event = &state->events[i];
            bool wanted = event->seq > registration->after_seq && (event->type & registration->types) &&
                          !strcmp(event->uuid, registration->device->uuid);
            if (wanted && (!oldest || event->seq < oldest->seq)) oldest = event, of = registration;
        }
    }
    if (!oldest) return code;
    of->after_seq = oldest->seq;
    *data = (nvmlEventData_t){.device = of->device,
                              .eventType = oldest->type,
                              .eventData = oldest->type == nvmlEventTypeXidCriticalError ? oldest->data : 0,
                              .gpuInstanceId = 0xFFFFFFFF,
                              .computeInstanceId = 0xFFFFFFFF};
    return NVML_SUCCESS;
}

static void wait_for_change(nvmlEventSet_t set, int timeout_ms) {
    char drained[4096];
    if (set->inotify < 0) {
        int ms = timeout_ms < POLL_WITHOUT_INOTIFY_MS ? timeout_ms : POLL_WITHOUT_INOTIFY_MS;
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1000000L}, NULL);
        return;
    }
    struct pollfd poller = {.fd = set->inotify, .events = POLLIN};
    if (poll(&poller, 1, timeout_ms) > 0)
        while (read(set->inotify, drained, sizeof drained) > 0) continue;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    double until_s = boottime_s() + timeout_ms / 1e3;
    for (;;) {
        nvmlReturn_t code = enter(__func__);
        if (code != NVML_SUCCESS) return code;
        code = next_event(state_lock(), set, data);
        state_unlock();
        int left_ms = (int)((until_s - boottime_s()) * 1e3 + 0.999);
        if (code != NVML_ERROR_TIMEOUT || left_ms <= 0) return code;
        wait_for_change(set, left_ms);
    }
}
