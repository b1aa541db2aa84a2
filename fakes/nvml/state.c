/* Reads the state file. A file that cannot be read counts as "no driver". */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "lib.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct state current, parsed;
static struct stat seen;
static bool seen_any;

enum kind { NUMBER, STRING };
struct key {
    const char *name;
    enum kind kind;
    size_t offset;
};
#define N(field) {#field, NUMBER, offsetof(struct gpu, field)}
#define S(field) {#field, STRING, offsetof(struct gpu, field)}
static const struct key GPU_KEYS[] = {
    S(uuid), S(name), S(serial), S(part_number), S(vbios), S(pci), S(cluster_uuid),
    N(minor), N(lost), N(vanished), N(handle_epoch), N(memory_total_bytes), N(memory_used_bytes),
    N(ecc_mode), N(mig_mode), N(persistence_mode),
    N(vol_dram_cor), N(vol_dram_unc), N(vol_sram_cor), N(vol_sram_unc),
    N(agg_dram_cor), N(agg_dram_unc), N(agg_sram_cor), N(agg_sram_unc),
    N(remap_cor), N(remap_unc), N(remap_pending), N(remap_failure),
    N(sram_threshold), N(unrepairable), N(unrepairable_versioned), N(recovery_action),
    N(temperature_c), N(memory_temperature_c), N(power_mw), N(energy_base_mj), N(energy_since_ms),
    N(gpu_utilization), N(memory_utilization), N(sm_clock_mhz), N(memory_clock_mhz), N(clock_event_reasons),
    N(pcie_generation), N(pcie_generation_max), N(pcie_width), N(pcie_width_max), N(pcie_replay),
    N(nvlinks), N(nvlink_down_mask), N(fabric_state), N(clique_id),
};

static void store_text(char *to, const char *text) { snprintf(to, TEXT, "%.*s", TEXT - 1, text); }

static void parse_gpu_key(struct gpu *gpu, const char *name, const char *value) {
    for (size_t i = 0; i < sizeof GPU_KEYS / sizeof *GPU_KEYS; i++) {
        if (strcmp(GPU_KEYS[i].name, name) != 0) continue;
        char *at = (char *)gpu + GPU_KEYS[i].offset;
        if (GPU_KEYS[i].kind == STRING)
            store_text(at, value);
        else
            *(uint64_t *)at = strtoull(value, NULL, 10);
        return;
    }
    fprintf(stderr, "fake nvml: unknown key `%s` in the state file\n", name);
}

static void parse_rule(struct state *state, const char *kind, const char *value) {
    struct rule rule = {.kind = kind[0] == 'b' ? RULE_BLOCK : RULE_FAIL};
    char number[TEXT] = "";
    if (state->rule_count >= MAX_RULES || sscanf(value, "%95s %95s %95s", rule.function, number, rule.uuid) < 2) return;
    rule.seconds = strtod(number, NULL);
    rule.code = atoi(number);
    state->rules[state->rule_count++] = rule;
}

static void parse_event(struct state *state, const char *value) {
    struct event event = {0};
    unsigned long long seq, type, data;
    if (state->event_count >= MAX_EVENTS || sscanf(value, "%llu %95s %llu %llu", &seq, event.uuid, &type, &data) != 4) return;
    event.seq = seq, event.type = type, event.data = data;
    state->events[state->event_count++] = event;
}

static enum driver driver_named(const char *value) {
    return !strcmp(value, "loaded") ? DRIVER_LOADED : !strcmp(value, "mismatch") ? DRIVER_MISMATCH : DRIVER_ABSENT;
}

/* One line; `gpu` begins a GPU, to which the lines after it belong. */
static void parse_line(struct state *state, struct gpu **gpu, char *line) {
    line[strcspn(line, "\n")] = 0;
    char *value = strchr(line, ' ');
    if (value) *value++ = 0;
    if (!value) value = "";
    if (!strcmp(line, "gpu")) {
        if (state->gpu_count < MAX_GPUS) *gpu = &state->gpus[state->gpu_count++];
    } else if (*gpu) parse_gpu_key(*gpu, line, value);
    else if (!strcmp(line, "driver")) state->driver = driver_named(value);
    else if (!strcmp(line, "driver_load")) state->driver_load = strtoull(value, NULL, 10);
    else if (!strcmp(line, "cuda_version")) state->cuda_version = strtoull(value, NULL, 10);
    else if (!strcmp(line, "driver_version")) store_text(state->driver_version, value);
    else if (!strcmp(line, "nvml_version")) store_text(state->nvml_version, value);
    else if (!strcmp(line, "block") || !strcmp(line, "fail")) parse_rule(state, line, value);
    else if (!strcmp(line, "event")) parse_event(state, value);
    else if (!strcmp(line, "unsupported") && state->unsupported_count < MAX_RULES)
        state->unsupported[state->unsupported_count++] = strtoull(value, NULL, 10);
}

static void parse_file(FILE *file, struct state *state) {
    char line[MAX_LINE];
    struct gpu *gpu = NULL;
    memset(state, 0, sizeof *state);
    state->driver = DRIVER_ABSENT;
    while (fgets(line, sizeof line, file))
        if (line[0] != '#' && line[0] != '\n') parse_line(state, &gpu, line);
    state->readable = true;
}

static void refresh(void) {
    const char *path = getenv(STATE_VARIABLE);
    struct stat now;
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file || fstat(fileno(file), &now)) {
        current.readable = false;
        current.driver = DRIVER_ABSENT;
        seen_any = false;
        if (file) fclose(file);
        return;
    }
    if (!seen_any || now.st_ino != seen.st_ino || now.st_size != seen.st_size ||
        now.st_mtim.tv_sec != seen.st_mtim.tv_sec || now.st_mtim.tv_nsec != seen.st_mtim.tv_nsec) {
        parse_file(file, &parsed);
        current = parsed;
        seen = now;
        seen_any = true;
    }
    fclose(file);
}

const struct state *state_lock(void) {
    pthread_mutex_lock(&mutex);
    refresh();
    return &current;
}

void state_unlock(void) { pthread_mutex_unlock(&mutex); }

const char *state_directory(void) {
    static _Thread_local char directory[PATH_MAX];
    const char *path = getenv(STATE_VARIABLE);
    if (!path || strlen(path) >= sizeof directory) return NULL;
    strcpy(directory, path);
    char *slash = strrchr(directory, '/');
    if (!slash) return ".";
    *slash = 0;
    return slash == directory ? "/" : directory;
}
