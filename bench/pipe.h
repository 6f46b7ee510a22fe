/* pipe.h - what a pipeline of bench_pipeline is made to do, the same for ours and for every peer.

   A flow is: feed makes items, one call at a time; `work` is called `pipes` times on each; then the
   items either end in `sink`, one call at a time on the threads of the peer, or go to a trainer who
   calls next. In order, unless it may be otherwise.

   A peer brings its own open, next, wait and close, or just `run`, which makes its threads, takes
   items with pipe_feed until there are none, puts each with pipe_put when its work is done, and
   returns when all have been put. For those there is an outlet here: a window of places, from which
   the items go on in order, so that every peer that has none of its own gets the same.

   What was done for them: who puts an item runs the sink himself for all that are ready; nobody is
   signalled who does not wait, and the source is woken when a half of the window is free. */
#ifndef PIPE_H_INCLUDED
#define PIPE_H_INCLUDED

#include "peer_mutex.h"

#define PIPE_MAX_LIVE 4096

typedef struct pipe_spec {
    int pipes;
    int concurrency; /* of each */
    int workers;
    int buffer_size; /* of an edge: there is one behind the source and one behind each stage */
    int live;        /* items in flight, where that is one number: what all the edges hold */
    int batch;       /* items of one call, for peers that start a thread for each; 0: one */
    bool unordered;
    bool pulled; /* by a trainer: there is no sink */
    void *ctx;
    bool (*feed)(void *ctx, uint64_t number, void **item); /* false: there are no more */
    void *(*work)(void *ctx, void *item);
    void (*sink)(void *ctx, void *item);
} pipe_spec;

typedef struct pipe_place {
    void *item;
    bool full;
} pipe_place;

typedef struct pipe_outlet {
    const pipe_spec *spec;
    void (*run)(struct pipe_outlet *outlet);
    pthread_t thread; /* runs `run` for a trainer */
    uint64_t window;
    uint64_t mask; /* a place for each item of the window, or more */
    pthread_mutex_t mutex;
    pthread_cond_t room;   /* for the source */
    pthread_cond_t filled; /* for the trainer */
    pipe_place *places;
    uint64_t head;    /* items that have gone on */
    uint64_t tail;    /* items that were put */
    uint64_t room_at; /* the source waits for the head to come here; 0: it does not */
    bool trainer_waits;
    bool ended;
    bool stopped; /* read without the mutex, too */
} pipe_outlet;

typedef struct pipe_peer {
    const char *name;
    void (*run)(pipe_outlet *outlet); /* or, when NULL: */
    void *(*open)(const pipe_spec *spec);
    bool (*next)(void *pipeline, void **item);
    void (*wait)(void *pipeline);  /* until every item is in the sink */
    void (*close)(void *pipeline); /* waits for the calls in flight */
} pipe_peer;

/* What the file of a peer exports. */
typedef int (*pipe_plugin_fn)(const pipe_peer **peers);

/* Images, three bytes a pixel, and the plugin that makes and decodes them. */
#define PIPE_JPEG_SIDE 256 /* of bench_pipeline */
#define PIPE_JPEG_PIXELS (PIPE_JPEG_SIDE * PIPE_JPEG_SIDE * 3)

typedef struct pipe_jpeg {
    unsigned char *bytes;
    unsigned long size;
} pipe_jpeg;

typedef struct pipe_jpeg_calls {
    const char *version;
    void (*make)(unsigned seed, int width, int height, pipe_jpeg *made);
    bool (*decode)(const pipe_jpeg *jpeg, int width, int height, unsigned char *pixels);
} pipe_jpeg_calls;

typedef const pipe_jpeg_calls *(*pipe_jpeg_fn)(void);

/* ---- the outlet ---- */

static inline pipe_outlet *pipe_outlet_create(const pipe_spec *spec) {
    pipe_outlet *o = (pipe_outlet *)peer_alloc(sizeof *o);
    o->spec = spec;
    o->window = (uint64_t)spec->live;
    while (o->mask + 1 < o->window) o->mask = 2 * o->mask + 1;
    o->places = (pipe_place *)peer_alloc((o->mask + 1) * sizeof *o->places);
    peer_mutex_init(&o->mutex);
    pthread_cond_init(&o->room, NULL);
    pthread_cond_init(&o->filled, NULL);
    return o;
}

static inline void pipe_outlet_destroy(pipe_outlet *o) {
    pthread_cond_destroy(&o->filled);
    pthread_cond_destroy(&o->room);
    pthread_mutex_destroy(&o->mutex);
    free(o->places);
    free(o);
}

static inline bool pipe_stopped(const pipe_outlet *o) {
    return __atomic_load_n(&o->stopped, __ATOMIC_RELAXED);
}

/* Waits until the item of this number has a place. With the mutex; by one thread at a time. */
static inline bool pipe_wait_room(pipe_outlet *o, uint64_t number) {
    while (number >= o->head + o->window && !o->stopped) {
        o->room_at = number - o->window + 1 + o->window / 2;
        pthread_cond_wait(&o->room, &o->mutex);
    }
    return !o->stopped;
}

/* The next item of the source, once it has a place. By one thread at a time. */
static inline bool pipe_feed(pipe_outlet *o, uint64_t number, void **item) {
    bool room;
    pthread_mutex_lock(&o->mutex);
    room = pipe_wait_room(o, number);
    pthread_mutex_unlock(&o->mutex);
    return room && o->spec->feed(o->spec->ctx, number, item);
}

/* More threads than there can be calls are of no use, but the source wants one. */
static inline int pipe_threads(const pipe_spec *spec) {
    const int calls = spec->pipes * spec->concurrency;
    const int useful = calls < spec->workers ? calls : spec->workers;
    return useful < 2 && spec->workers > 1 ? 2 : useful;
}

/* All the stages, in one go: there is room for as many calls as there are threads. */
static inline void *pipe_work(const pipe_spec *spec, void *item) {
    int i;
    for (i = 0; i < spec->pipes; ++i) item = spec->work(spec->ctx, item);
    return item;
}

static inline pipe_place *pipe_place_of(pipe_outlet *o, uint64_t number) {
    return &o->places[number & o->mask];
}

/* One item has gone on. With the mutex. */
static inline void pipe_advance(pipe_outlet *o) {
    pipe_place_of(o, o->head++)->full = false;
    if (o->room_at == 0 || o->head < o->room_at) return;
    o->room_at = 0;
    pthread_cond_signal(&o->room);
}

static inline void pipe_sink_ready(pipe_outlet *o) {
    pipe_place *place;
    while ((place = pipe_place_of(o, o->head))->full) {
        o->spec->sink(o->spec->ctx, place->item);
        pipe_advance(o);
    }
}

/* Unlocks. */
static inline void pipe_put_locked(pipe_outlet *o, uint64_t number, void *item) {
    pipe_place *place = pipe_place_of(o, o->spec->unordered ? o->tail : number);
    bool wake = false;
    ++o->tail;
    place->item = item;
    place->full = true;
    if (!o->spec->pulled) {
        pipe_sink_ready(o);
    } else if (o->trainer_waits && pipe_place_of(o, o->head)->full) {
        wake = true;
        o->trainer_waits = false;
    }
    pthread_mutex_unlock(&o->mutex);
    if (wake) pthread_cond_signal(&o->filled);
}

/* The item is done; its number is that of the source, and has a place. */
static inline void pipe_put(pipe_outlet *o, uint64_t number, void *item) {
    pthread_mutex_lock(&o->mutex);
    pipe_put_locked(o, number, item);
}

/* For who bounds what is in flight himself: waits for a place. By one thread at a time. */
static inline void pipe_put_wait(pipe_outlet *o, uint64_t number, void *item) {
    pthread_mutex_lock(&o->mutex);
    if (pipe_wait_room(o, number)) {
        pipe_put_locked(o, number, item);
    } else {
        pthread_mutex_unlock(&o->mutex);
    }
}

/* ---- a peer from its run ---- */

static inline void *pipe_run_main(void *arg) {
    pipe_outlet *o = (pipe_outlet *)arg;
    o->run(o);
    pthread_mutex_lock(&o->mutex);
    o->ended = true;
    pthread_mutex_unlock(&o->mutex);
    pthread_cond_signal(&o->filled);
    return NULL;
}

/* With a sink the run is in the thread that waits for the end. */
static inline pipe_outlet *pipe_open(const pipe_peer *peer, const pipe_spec *spec) {
    pipe_outlet *o = pipe_outlet_create(spec);
    o->run = peer->run;
    if (spec->pulled) peer_thread(&o->thread, pipe_run_main, o);
    return o;
}

static inline bool pipe_next(pipe_outlet *o, void **item) {
    pipe_place *place;
    pthread_mutex_lock(&o->mutex);
    while (!(place = pipe_place_of(o, o->head))->full && !o->ended) {
        o->trainer_waits = true;
        pthread_cond_wait(&o->filled, &o->mutex);
    }
    if (!place->full) {
        pthread_mutex_unlock(&o->mutex);
        return false;
    }
    *item = place->item;
    pipe_advance(o);
    pthread_mutex_unlock(&o->mutex);
    return true;
}

static inline void pipe_close(pipe_outlet *o) {
    pthread_mutex_lock(&o->mutex);
    __atomic_store_n(&o->stopped, true, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&o->mutex);
    pthread_cond_broadcast(&o->room);
    if (o->spec->pulled) pthread_join(o->thread, NULL);
    pipe_outlet_destroy(o);
}

#endif /* PIPE_H_INCLUDED */
