/* A stand-in for libnvidia-ml.so.1: what it answers is in a file of lines `key=value`, read anew at every call, so
 * that a test changes the node while things run. Without the file there is no driver. See standin.py for the keys.
 * The structs and names are those of NVML's API; sizes are in bytes. */

#define _GNU_SOURCE
#include <ctype.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#ifndef STATE_FILE
#error "STATE_FILE is the path of the state"
#endif

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9, TIMED_OUT = 10, LOST = 15 };
enum { MOST_GPUS = 64, TEXT = 512, FIELD_RECOVERY = 230, EVENT_XID = 8 };
#define EXPORT __attribute__((visibility("default")))

typedef struct { int index; } gpu_t;
typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; uint64_t bytes; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef union { double d; unsigned u; unsigned long long ull; } value_t;
typedef struct { uint32_t id, scope; int64_t time, latency; unsigned type; int result; value_t value; } field_t;
typedef struct { gpu_t *gpu; uint64_t type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct { unsigned long seen; } set_t;

static gpu_t gpus[MOST_GPUS];

static const char *state_file(void)
{
    const char *path = getenv("DFLASH_STANDIN_NVML");
    return path && *path ? path : STATE_FILE;
}

/* The value of a key; 0 if the key or the file is not there. */
static int lookup(const char *key, char value[TEXT])
{
    FILE *file = fopen(state_file(), "re");
    if (!file)
        return 0;
    char line[4096];
    int found = 0;
    size_t length = strlen(key);
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, key, length) == 0 && line[length] == '=') {
            snprintf(value, TEXT, "%.*s", TEXT - 1, line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int number(const char *key, long long *value)
{
    char text[TEXT];
    if (!lookup(key, text))
        return 0;
    *value = strtoll(text, NULL, 0);
    return 1;
}

static int gpu_text(const gpu_t *gpu, const char *name, char value[TEXT])
{
    char key[TEXT];
    snprintf(key, sizeof key, "%d.%s", gpu->index, name);
    return lookup(key, value);
}

static int gpu_number(const gpu_t *gpu, const char *name, long long *value)
{
    char text[TEXT];
    if (!gpu_text(gpu, name, text))
        return 0;
    *value = strtoll(text, NULL, 0);
    return 1;
}

/* What every call on a GPU begins with: a hang, a lost GPU, an error that the test wants. */
static int enter(const gpu_t *gpu, const char *function)
{
    long long value;
    char key[TEXT];
    while (number("hang", &value) && value)
        poll(NULL, 0, 50);
    if (!gpu || gpu < gpus || gpu >= gpus + MOST_GPUS)
        return INVALID;
    if (access(state_file(), R_OK))
        return NO_DRIVER;
    if (gpu_number(gpu, "lost", &value) && value)
        return LOST;
    snprintf(key, sizeof key, "error.%s", function);
    return gpu_number(gpu, key, &value) ? (int)value : OK;
}

#define ENTER(gpu) do { int code = enter(gpu, __func__); if (code) return code; } while (0)

static int give_text(const gpu_t *gpu, const char *name, char *buffer, unsigned size)
{
    char text[TEXT];
    if (!gpu_text(gpu, name, text))
        return NOT_SUPPORTED;
    snprintf(buffer, size, "%s", text);
    return OK;
}

static int give_unsigned(const gpu_t *gpu, const char *name, unsigned *value)
{
    long long found;
    if (!gpu_number(gpu, name, &found))
        return NOT_SUPPORTED;
    *value = (unsigned)found;
    return OK;
}

/* `41:8589934592 57:none` */
static int give_processes(const gpu_t *gpu, const char *name, unsigned *count, process_t *list)
{
    char text[TEXT] = "", *rest, *word;
    unsigned found = 0, room = *count;
    gpu_text(gpu, name, text);
    for (word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest), found++) {
        char *size = strchr(word, ':');
        if (list && found < room) {
            uint64_t bytes = size && isdigit(size[1]) ? strtoull(size + 1, NULL, 0) : UINT64_MAX;
            list[found] = (process_t){(unsigned)strtoul(word, NULL, 0), bytes, UINT32_MAX, UINT32_MAX};
        }
    }
    *count = found;
    return found > (list ? room : 0) ? TOO_SMALL : OK;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    long long code = OK;
    (void)flags;
    for (int i = 0; i < MOST_GPUS; i++)
        gpus[i].index = i;
    if (number("init.error", &code))
        return (int)code;
    return access(state_file(), R_OK) ? NO_DRIVER : OK;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT int nvmlShutdown(void) { return OK; }
EXPORT const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error of the stand-in"; }

EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned size)
{
    char text[TEXT];
    if (!lookup("driver", text))
        return NOT_SUPPORTED;
    snprintf(buffer, size, "%s", text);
    return OK;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    long long value = 0;
    if (number("count.error", &value))
        return (int)value;
    number("count", &value);
    *count = (unsigned)value;
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu)
{
    long long count = 0, code;
    number("count", &count);
    if (index >= MOST_GPUS || index >= count)
        return INVALID;
    *gpu = &gpus[index];
    return gpu_number(*gpu, "handle.error", &code) ? (int)code : OK;
}

EXPORT int nvmlDeviceGetUUID(gpu_t *gpu, char *buffer, unsigned size)
{
    ENTER(gpu);
    return give_text(gpu, "uuid", buffer, size);
}

EXPORT int nvmlDeviceGetName(gpu_t *gpu, char *buffer, unsigned size)
{
    ENTER(gpu);
    return give_text(gpu, "name", buffer, size);
}

EXPORT int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index)
{
    ENTER(gpu);
    *index = (unsigned)gpu->index;
    return OK;
}

EXPORT int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned *minor)
{
    ENTER(gpu);
    return give_unsigned(gpu, "minor", minor);
}

EXPORT int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci)
{
    ENTER(gpu);
    memset(pci, 0, sizeof *pci);
    return give_text(gpu, "bus_id", pci->bus_id, sizeof pci->bus_id);
}

/* Keys `total`, `used` (with what the driver reserves) and `reserved`. */
EXPORT int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory)
{
    long long total, used;
    ENTER(gpu);
    if (!gpu_number(gpu, "total", &total) || !gpu_number(gpu, "used", &used))
        return NOT_SUPPORTED;
    *memory = (memory_t){(uint64_t)total, (uint64_t)(total - used), (uint64_t)used};
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory_v2_t *memory)
{
    long long total, used, reserved;
    ENTER(gpu);
    if (!gpu_number(gpu, "total", &total) || !gpu_number(gpu, "used", &used) || !gpu_number(gpu, "reserved", &reserved))
        return NOT_SUPPORTED;
    memory->total = (uint64_t)total;
    memory->reserved = (uint64_t)reserved;
    memory->free = (uint64_t)(total - used);
    memory->used = (uint64_t)(used - reserved);
    return OK;
}

#define PROCESSES(name, key) \
    EXPORT int name(gpu_t *gpu, unsigned *count, process_t *list) \
    { \
        ENTER(gpu); \
        return give_processes(gpu, key, count, list); \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

EXPORT int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *pending)
{
    ENTER(gpu);
    *pending = 0;
    return give_unsigned(gpu, "mig", now);
}

EXPORT int nvmlDeviceGetComputeMode(gpu_t *gpu, unsigned *mode)
{
    ENTER(gpu);
    return give_unsigned(gpu, "compute_mode", mode);
}

EXPORT int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned type, unsigned counter, unsigned long long *count)
{
    long long value;
    ENTER(gpu);
    (void)counter;
    if (!gpu_number(gpu, type ? "ecc_uncorrected" : "ecc_corrected", &value))
        return NOT_SUPPORTED;
    *count = (unsigned long long)value;
    return OK;
}

/* Key `remap`: corrected,uncorrected,pending,failure */
EXPORT int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    char text[TEXT];
    ENTER(gpu);
    if (!gpu_text(gpu, "remap", text) || sscanf(text, "%u,%u,%u,%u", corrected, uncorrected, pending, failed) != 4)
        return NOT_SUPPORTED;
    return OK;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *gpu, unsigned long long *reasons)
{
    long long value;
    ENTER(gpu);
    if (!gpu_number(gpu, "throttle", &value))
        return NOT_SUPPORTED;
    *reasons = (unsigned long long)value;
    return OK;
}

EXPORT int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields)
{
    ENTER(gpu);
    for (int i = 0; i < count; i++) {
        fields[i].result = NOT_SUPPORTED;
        if (fields[i].id == FIELD_RECOVERY) {
            fields[i].type = 1; /* unsigned int */
            fields[i].result = give_unsigned(gpu, "recovery", &fields[i].value.u);
        }
    }
    return OK;
}

EXPORT int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *degrees)
{
    ENTER(gpu);
    (void)sensor;
    return give_unsigned(gpu, "temperature", degrees);
}

EXPORT int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilization_t *utilization)
{
    ENTER(gpu);
    utilization->memory = 0;
    return give_unsigned(gpu, "utilization", &utilization->gpu);
}

EXPORT int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *milliwatts)
{
    ENTER(gpu);
    return give_unsigned(gpu, "power", milliwatts);
}

EXPORT int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, unsigned long long *types)
{
    ENTER(gpu);
    *types = EVENT_XID;
    return OK;
}

EXPORT int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, set_t *set)
{
    ENTER(gpu);
    (void)types;
    return set ? OK : INVALID;
}

/* The event with the number after `seen`: key `xid.N`, value `GPU:CODE`. */
static int next_event(set_t *set, event_t *event)
{
    char key[64], text[TEXT];
    unsigned gpu, code;
    snprintf(key, sizeof key, "xid.%lu", set->seen + 1);
    if (!lookup(key, text) || sscanf(text, "%u:%u", &gpu, &code) != 2 || gpu >= MOST_GPUS)
        return 0;
    set->seen++;
    *event = (event_t){&gpus[gpu], EVENT_XID, code, UINT32_MAX, UINT32_MAX};
    return 1;
}

EXPORT int nvmlEventSetCreate(set_t **set)
{
    event_t past;
    *set = calloc(1, sizeof **set);
    if (!*set)
        return 20;
    while (next_event(*set, &past))
        ;
    return OK;
}

EXPORT int nvmlEventSetFree(set_t *set)
{
    free(set);
    return OK;
}

EXPORT int nvmlEventSetWait_v2(set_t *set, event_t *event, unsigned milliseconds)
{
    struct timespec now;
    char directory[4096], buffer[4096] __attribute__((aligned(8)));
    snprintf(directory, sizeof directory, "%s", state_file());
    char *slash = strrchr(directory, '/');
    if (!slash)
        return INVALID;
    *slash = 0;
    int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), result = TIMED_OUT;
    if (watch < 0 || inotify_add_watch(watch, directory, IN_CLOSE_WRITE | IN_MOVED_TO | IN_DELETE) < 0)
        result = 999;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t end = now.tv_sec * 1000 + now.tv_nsec / 1000000 + milliseconds, left = milliseconds;
    while (result == TIMED_OUT) {
        struct pollfd wait = {.fd = watch, .events = POLLIN};
        if (access(state_file(), R_OK)) {
            result = NO_DRIVER;
        } else if (next_event(set, event)) {
            result = OK;
        } else if (left <= 0 || poll(&wait, 1, (int)left) == 0) {
            break;
        }
        while (read(watch, buffer, sizeof buffer) > 0)
            ;
        clock_gettime(CLOCK_MONOTONIC, &now);
        left = end - (now.tv_sec * 1000 + now.tv_nsec / 1000000);
    }
    if (watch >= 0)
        close(watch);
    return result;
}
