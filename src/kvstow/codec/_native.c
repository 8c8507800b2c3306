/* The copy kernel: blocks of engine memory <-> one flat payload, without the GIL.
 *
 *   bind(regions, segments, num_blocks)          -> bound
 *   gather(bound, blocks, target, threads)       -> None
 *   scatter(bound, blocks, source, skip, threads) -> None
 *   memcpy_gather(bound, blocks, target), memcpy_scatter(bound, blocks, source) -> None
 *
 * `regions`: a sequence of writable buffers. `segments`: int64 [num_segments, 4] of (region,
 * offset, block stride, block bytes), in bytes. `blocks`: int64 [count]. Payloads are
 * segment-major, as kvstow.layout.geometry says. A bound object holds the regions' buffers, so
 * their memory lives as long as it does. Everything is checked here before a byte is touched:
 * a segment that leaves its region, a block id out of range, or a payload of the wrong size is a
 * ValueError. Calls share nothing, so any thread may make them.
 *
 * The last two are the plain loop of memcpy over the same blocks: the bound that the bench holds
 * the kernel to, not a path that kvstow takes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_STREAMING 1
#include <immintrin.h>
#else
#define HAVE_STREAMING 0
#endif

#define CAPSULE_NAME "kvstow.codec._native.bound"
#define SEGMENT_FIELDS 4
#define THREADS_MAX 64
/* Starting a thread costs tens of microseconds: a part below this is copied sooner without one. */
#define PART_BYTES_MIN ((int64_t)256 << 10)
/* Below this, lining up the destination costs more than streaming saves. */
#define STREAM_BYTES_MIN 512
/* How much of the next block to ask for while this one is copied. Blocks lie in random order, so
 * the hardware's own prefetch starts anew in each; past this it has caught up. */
#define PREFETCH_BYTES_MAX ((size_t)32 << 10)
#define LINE_BYTES 64
#define STEP_BYTES 128

typedef struct {
    char *base;            /* block 0's share */
    int64_t stride;        /* between the shares of consecutive blocks */
    int64_t bytes;         /* of one share */
    int64_t payload_bytes; /* of one block in the segments before this one */
} segment_t;

typedef struct {
    Py_ssize_t num_regions;
    Py_buffer *regions;
    Py_ssize_t num_segments;
    segment_t *segments;
    int64_t num_blocks;
    int64_t block_bytes; /* of one block over all segments */
} bound_t;

/* Copies one run. `next`: where the next run will be read, or NULL; a hint only. */
typedef void (*copy_fn)(char *to, const char *from, size_t bytes, const char *next);

typedef enum { GATHER, SCATTER } direction_t;

typedef struct {
    const bound_t *bound;
    const int64_t *blocks;
    int64_t count; /* blocks in the payload */
    int64_t skip;  /* blocks at its front to leave alone */
    char *payload;
    direction_t direction;
    copy_fn copy;
} transfer_t;

/* A place in the order (segment, block) of a transfer. */
typedef struct {
    Py_ssize_t segment;
    int64_t block;
} cursor_t;

typedef struct {
    const transfer_t *transfer;
    cursor_t begin, end;
} part_t;

/* ---- copying one run ---- */

static void copy_plain(char *to, const char *from, size_t bytes, const char *next)
{
    (void)next;
    memcpy(to, from, bytes);
}

#if HAVE_STREAMING
__attribute__((target("avx"))) static inline void stream_step(char *to, const char *from)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
}

/* Streaming stores skip reading the lines that are about to be overwritten, a third of the memory
 * traffic of a copy. Only whole lines are streamed: a line written in two parts costs more. */
__attribute__((target("avx"))) static void copy_streaming(char *to, const char *from, size_t bytes,
                                                          const char *next)
{
    if (bytes < STREAM_BYTES_MIN) {
        memcpy(to, from, bytes);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)to & (LINE_BYTES - 1));
    memcpy(to, from, head);
    size_t body = (bytes - head) / STEP_BYTES * STEP_BYTES;
    size_t ahead = next == NULL ? 0 : (body < PREFETCH_BYTES_MAX ? body : PREFETCH_BYTES_MAX);
    size_t lead = head + body - ahead / STEP_BYTES * STEP_BYTES;
    size_t at = head;
    for (; at < lead; at += STEP_BYTES)
        stream_step(to + at, from + at);
    for (; at < head + body; at += STEP_BYTES) {
        _mm_prefetch(next + (at - lead), _MM_HINT_T0);
        _mm_prefetch(next + (at - lead) + LINE_BYTES, _MM_HINT_T0);
        stream_step(to + at, from + at);
    }
    memcpy(to + at, from + at, bytes - at);
}
#endif

static copy_fn best_copy = copy_plain;

static void choose_copy(void)
{
#if HAVE_STREAMING
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx"))
        best_copy = copy_streaming;
#endif
}

/* Streaming stores are weakly ordered: they must be seen before the call returns. */
static void finish_copy(void)
{
#if HAVE_STREAMING
    _mm_sfence();
#endif
}

/* ---- copying a transfer ---- */

static inline char *block_address(const segment_t *segment, int64_t block)
{
    return segment->base + block * segment->stride;
}

/* Blocks from `at` that lie one after the other in engine memory, hence are one run. */
static inline int64_t run_blocks(const segment_t *segment, const int64_t *blocks, int64_t at, int64_t end)
{
    int64_t run = 1;
    if (segment->stride == segment->bytes)
        while (at + run < end && blocks[at + run] == blocks[at] + run)
            run++;
    return run;
}

/* `after`: where the transfer goes on when this segment is done, or NULL. */
static void copy_segment(const transfer_t *t, const segment_t *segment, int64_t begin, int64_t end,
                         const char *after)
{
    char *payload = t->payload + t->count * segment->payload_bytes;
    for (int64_t at = begin; at < end;) {
        int64_t run = run_blocks(segment, t->blocks, at, end);
        size_t bytes = (size_t)(run * segment->bytes);
        char *engine = block_address(segment, t->blocks[at]);
        char *flat = payload + at * segment->bytes;
        at += run;
        if (t->direction == GATHER)
            t->copy(flat, engine, bytes, at < end ? block_address(segment, t->blocks[at]) : after);
        else
            t->copy(engine, flat, bytes, NULL);
    }
}

static void *copy_part(void *argument)
{
    const part_t *part = argument;
    const transfer_t *t = part->transfer;
    Py_ssize_t last = t->bound->num_segments - 1;
    if (part->end.segment < last)
        last = part->end.segment;
    for (Py_ssize_t s = part->begin.segment; s <= last; s++) {
        const segment_t *segment = &t->bound->segments[s];
        int64_t begin = s == part->begin.segment ? part->begin.block : t->skip;
        int64_t end = s == part->end.segment ? part->end.block : t->count;
        const char *after = s < last ? block_address(segment + 1, t->blocks[t->skip]) : NULL;
        copy_segment(t, segment, begin, end, after);
    }
    finish_copy();
    return NULL;
}

/* The place that has `position` bytes of the transfer before it, rounded up to a whole block. */
static cursor_t cursor_at(const transfer_t *t, int64_t position)
{
    int64_t active = t->count - t->skip;
    cursor_t cursor = {0, t->skip};
    for (; cursor.segment < t->bound->num_segments; cursor.segment++) {
        const segment_t *segment = &t->bound->segments[cursor.segment];
        if (position < active * segment->bytes) {
            cursor.block += (position + segment->bytes - 1) / segment->bytes;
            break;
        }
        position -= active * segment->bytes;
    }
    return cursor;
}

static void copy_transfer(const transfer_t *t, int64_t threads)
{
    int64_t total = (t->count - t->skip) * t->bound->block_bytes;
    if (threads > total / PART_BYTES_MIN)
        threads = total / PART_BYTES_MIN;
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    if (threads < 1)
        threads = 1;
    part_t parts[THREADS_MAX];
    pthread_t handles[THREADS_MAX];
    int started[THREADS_MAX] = {0};
    for (int64_t i = 0; i < threads; i++) {
        parts[i].transfer = t;
        parts[i].begin = cursor_at(t, total / threads * i);
        parts[i].end = i + 1 == threads ? cursor_at(t, total) : cursor_at(t, total / threads * (i + 1));
    }
    for (int64_t i = 1; i < threads; i++)
        started[i] = pthread_create(&handles[i], NULL, copy_part, &parts[i]) == 0;
    for (int64_t i = 0; i < threads; i++) /* a part whose thread did not start is copied here */
        if (!started[i])
            copy_part(&parts[i]);
    for (int64_t i = 1; i < threads; i++)
        if (started[i])
            pthread_join(handles[i], NULL);
}

/* ---- binding ---- */

static void free_bound(bound_t *bound)
{
    for (Py_ssize_t i = 0; i < bound->num_regions; i++)
        PyBuffer_Release(&bound->regions[i]);
    PyMem_Free(bound->regions);
    PyMem_Free(bound->segments);
    PyMem_Free(bound);
}

static void destroy_capsule(PyObject *capsule)
{
    free_bound(PyCapsule_GetPointer(capsule, CAPSULE_NAME));
}

/* Takes the regions' buffers; `bound->num_regions` counts those held, for free_bound. */
static int bind_regions(bound_t *bound, PyObject *regions)
{
    Py_ssize_t count = PySequence_Fast_GET_SIZE(regions);
    bound->regions = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (bound->regions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *region = PySequence_Fast_GET_ITEM(regions, i);
        if (PyObject_GetBuffer(region, &bound->regions[i], PyBUF_WRITABLE) < 0)
            return -1;
        bound->num_regions++;
    }
    return 0;
}

/* True if all `num_blocks` shares lie in a region of `region_bytes`; never overflows. */
static int segment_fits(int64_t offset, int64_t stride, int64_t bytes, int64_t num_blocks, int64_t region_bytes)
{
    if (offset < 0 || bytes < 1 || stride < 0 || offset > region_bytes || bytes > region_bytes - offset)
        return 0;
    return num_blocks <= 1 || stride <= (region_bytes - offset - bytes) / (num_blocks - 1);
}

static int bind_segments(bound_t *bound, const int64_t *fields, Py_ssize_t count)
{
    bound->segments = PyMem_Calloc((size_t)count + 1, sizeof(segment_t));
    if (bound->segments == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    bound->num_segments = count;
    for (Py_ssize_t i = 0; i < count; i++, fields += SEGMENT_FIELDS) {
        int64_t region = fields[0], offset = fields[1], stride = fields[2], bytes = fields[3];
        if (region < 0 || region >= bound->num_regions ||
            !segment_fits(offset, stride, bytes, bound->num_blocks, bound->regions[region].len)) {
            PyErr_Format(PyExc_ValueError, "segment %zd leaves its region", i);
            return -1;
        }
        bound->segments[i] = (segment_t){(char *)bound->regions[region].buf + offset, stride, bytes,
                                         bound->block_bytes};
        bound->block_bytes += bytes;
    }
    return 0;
}

static PyObject *native_bind(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *regions_arg;
    Py_buffer fields;
    long long num_blocks;
    if (!PyArg_ParseTuple(args, "Oy*L", &regions_arg, &fields, &num_blocks))
        return NULL;
    PyObject *capsule = NULL;
    PyObject *regions = PySequence_Fast(regions_arg, "regions must be a sequence of buffers");
    bound_t *bound = PyMem_Calloc(1, sizeof(bound_t));
    if (bound == NULL)
        PyErr_NoMemory();
    else if (regions != NULL) {
        bound->num_blocks = num_blocks;
        Py_ssize_t record_bytes = SEGMENT_FIELDS * (Py_ssize_t)sizeof(int64_t);
        if (fields.len % record_bytes != 0 || num_blocks < 0)
            PyErr_SetString(PyExc_ValueError, "segments must be int64 [n, 4] and num_blocks at least 0");
        else if (bind_regions(bound, regions) == 0 &&
                 bind_segments(bound, fields.buf, fields.len / record_bytes) == 0)
            capsule = PyCapsule_New(bound, CAPSULE_NAME, destroy_capsule);
    }
    if (capsule == NULL && bound != NULL)
        free_bound(bound);
    Py_XDECREF(regions);
    PyBuffer_Release(&fields);
    return capsule;
}

/* ---- calls ---- */

static int check_transfer(const transfer_t *t, Py_ssize_t blocks_bytes, Py_ssize_t payload_bytes)
{
    if (blocks_bytes % (Py_ssize_t)sizeof(int64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "blocks must be int64");
        return -1;
    }
    if (t->skip < 0 || t->skip > t->count) {
        PyErr_Format(PyExc_ValueError, "skip_blocks=%lld is outside [0, %lld]", (long long)t->skip,
                     (long long)t->count);
        return -1;
    }
    /* By division: count * block_bytes may not fit. */
    int64_t block_bytes = t->bound->block_bytes;
    if (block_bytes == 0 ? payload_bytes != 0
                         : payload_bytes % block_bytes != 0 || payload_bytes / block_bytes != t->count) {
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes does not hold %lld blocks of %lld bytes",
                     payload_bytes, (long long)t->count, (long long)block_bytes);
        return -1;
    }
    for (int64_t i = t->skip; i < t->count; i++)
        if (t->blocks[i] < 0 || t->blocks[i] >= t->bound->num_blocks) {
            PyErr_Format(PyExc_ValueError, "block id %lld is outside [0, %lld)", (long long)t->blocks[i],
                         (long long)t->bound->num_blocks);
            return -1;
        }
    return 0;
}

static PyObject *transfer(PyObject *capsule, Py_buffer *blocks, Py_buffer *payload, direction_t direction,
                          long long skip, long long threads, copy_fn copy)
{
    PyObject *result = NULL;
    const bound_t *bound = PyCapsule_GetPointer(capsule, CAPSULE_NAME);
    if (bound != NULL) {
        transfer_t t = {bound,        blocks->buf, blocks->len / (Py_ssize_t)sizeof(int64_t), skip,
                        payload->buf, direction,   copy};
        if (check_transfer(&t, blocks->len, payload->len) == 0) {
            Py_BEGIN_ALLOW_THREADS
            copy_transfer(&t, threads);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(payload);
    PyBuffer_Release(blocks);
    return result;
}

static PyObject *native_gather(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer blocks, target;
    long long threads;
    if (!PyArg_ParseTuple(args, "Oy*w*L", &capsule, &blocks, &target, &threads))
        return NULL;
    return transfer(capsule, &blocks, &target, GATHER, 0, threads, best_copy);
}

static PyObject *native_scatter(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer blocks, source;
    long long skip, threads;
    if (!PyArg_ParseTuple(args, "Oy*y*LL", &capsule, &blocks, &source, &skip, &threads))
        return NULL;
    return transfer(capsule, &blocks, &source, SCATTER, skip, threads, best_copy);
}

static PyObject *native_memcpy_gather(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer blocks, target;
    if (!PyArg_ParseTuple(args, "Oy*w*", &capsule, &blocks, &target))
        return NULL;
    return transfer(capsule, &blocks, &target, GATHER, 0, 1, copy_plain);
}

static PyObject *native_memcpy_scatter(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer blocks, source;
    if (!PyArg_ParseTuple(args, "Oy*y*", &capsule, &blocks, &source))
        return NULL;
    return transfer(capsule, &blocks, &source, SCATTER, 0, 1, copy_plain);
}

static PyMethodDef methods[] = {
    {"bind", native_bind, METH_VARARGS, "bind(regions, segments, num_blocks) -> bound"},
    {"gather", native_gather, METH_VARARGS, "gather(bound, blocks, target, threads)"},
    {"scatter", native_scatter, METH_VARARGS, "scatter(bound, blocks, source, skip_blocks, threads)"},
    {"memcpy_gather", native_memcpy_gather, METH_VARARGS, "memcpy_gather(bound, blocks, target): the bench's bound"},
    {"memcpy_scatter", native_memcpy_scatter, METH_VARARGS,
     "memcpy_scatter(bound, blocks, source): the bench's bound"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Copies blocks of engine memory to and from flat payloads without the GIL.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    choose_copy();
    return PyModule_Create(&module);
}
