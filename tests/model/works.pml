/* The consumer that works: spdl__next_wait and spdl__next_sleep of >>next-impl, with whoever else
   runs rows and goes elsewhere (spdl__pool_visit, spdl__pool_job, spdl__guest_leave,
   spdl__pool_pass_on of >>pool-impl; spdl__wake_rows of >>wake-impl).

   One row with one call at a time. A feeder puts ITEMS inputs, and submits a job at some moment.
   All inputs but the last are dropped: nothing of them reaches the sink, which alone would wake
   the consumer. A worker of the pool takes the job first. The job ends, or never ends. After a call
   the worker may go to another pipeline for ever. A guest works
   in the only place for guests until its budget is over, which may be at any moment, and does not
   come again. The consumer is in next until it has the last item. It works when it has that place,
   and leaves it before it sleeps. While another has the place and there is work, its sleeps end by
   themselves. A full barrier, then a look at who sleeps, follows each put, take and leave, and goes
   before each way elsewhere.

   Checked: when nothing moves any more, neither the worker nor the consumer sleeps while the row
   can run, and the consumer does not sleep while its item is there.

     -DALONE    the pool has no worker, and nobody submits a job
     -DNO_GUEST the place is the consumer's alone
     -DASIDE    the first input is the one that makes a result, and the consumer goes on elsewhere
                with it

   Switches that take out one part of the protocol, and must fail:
     SILENT_GUEST   a guest whose budget is over tells no consumer
     SILENT_JOB     neither does a worker that begins a job
     SILENT_OVER    nor one that leaves the row for another pipeline
     NO_PUT_FENCE   no full barrier between put and look
     NO_RECHECK     the consumer does not look at the row once it has said that it waits
     PLAIN_WAITING  `waiting` is stored, without a full barrier before that look
     LATE_FED       `fed` is read after that look
     NO_LEAVE_HINT  (with ASIDE) a consumer that returns from next wakes no worker */

#ifndef ITEMS
#define ITEMS 2
#endif
#define PROCS 4
#define WORKER 0
#define GUEST 1
#define CONSUMER 2
#define FEEDER 3
#define WORD 0 /* head * 2 + active */
#define WAITING 1
#define SINK 2
#define IN(i) (3 + (i))
#define ADDRESSES (3 + ITEMS)

/* only ever changed by read-modify-writes; sleepers: the worker, and 16 for the consumer */
byte sleepers, fed, bell;
bit waking, place, job;

bool worker_asleep, announced, consumer_asleep;

#include "tso.pml"

#define HEAD(p) (LOAD(p, WORD) / 2)
#define RUNS(p)                                                                                    \
    ((LOAD(p, WORD) & 1) == 0 && HEAD(p) < ITEMS &&                                                \
     LOAD(p, IN((HEAD(p) < ITEMS -> HEAD(p) : 0))) == 1)
#ifdef ASIDE
#define FIRST 0 /* of the row's inputs, which makes a result */
#else
#define FIRST (ITEMS - 1)
#endif

inline wake_worker(p) {
    d_step { FENCED(p); found = waking == 0; waking = 1 };
    if
    :: found ->
        d_step {
            found = announced;
            announced = false;
            if
            :: found -> bell++; worker_asleep = false; found = false
            :: else -> waking = 0
            fi
        }
    :: else
    fi
}

inline wake_consumer(p) {
    d_step { FENCED(p); found = mem[WAITING] == 1; mem[WAITING] = 0 };
    if
    :: found -> d_step { fed++; consumer_asleep = false; found = false }
    :: else
    fi
}

/* spdl__wake_rows: a worker, or if none sleeps the consumer */
inline wake_rows(p) {
    if
    :: (sleepers & 15) > 0 && waking == 0 ->
        if
        :: RUNS(p) -> wake_worker(p)
        :: else
        fi
    :: else ->
        if
        :: LOAD(p, WAITING) == 1 && RUNS(p) -> wake_consumer(p)
        :: else
        fi
    fi
}

/* spdl__pool_hint */
inline hint_workers(p) {
    if
    :: (sleepers & 15) > 0 && waking == 0 && (RUNS(p) || job) -> wake_worker(p)
    :: else
    fi
}

/* spdl__pool_pass_on */
inline pass_on(p) {
    FENCED(p);
    if
    :: (sleepers & 15) > 0 && waking == 0 ->
        if
        :: RUNS(p) || job -> wake_worker(p)
        :: else
        fi
    :: else ->
        if
        :: sleepers >= 16 && LOAD(p, WAITING) == 1 && RUNS(p) -> wake_consumer(p)
        :: else
        fi
    fi
}

/* A sitting of one call, as far as there is something. `did`: there was. */
inline step(p) {
    w = LOAD(p, WORD);
    if
    :: RUNS(p) && w == LOAD(p, WORD) ->
        d_step {
            FENCED(p);
            did = mem[WORD] == w;
            if
            :: did -> mem[WORD] = w + 3
            :: else
            fi
        };
        if
        :: did && w / 2 == FIRST -> store(p, SINK, 1)
        :: else
        fi;
        if
        :: did ->
            d_step { FENCED(p); mem[WORD] = mem[WORD] - 1 };
            if /* the row is the last one; there is none beside it */
            :: sleepers >= 16 && LOAD(p, WAITING) == 1 && LOAD(p, SINK) == 1 -> wake_consumer(p)
            :: else
            fi
        :: else
        fi
    :: else -> did = false
    fi;
    w = 0
}

proctype Worker() {
    byte word, w;
    bool found, did;
look:
    if
    :: job ->
        d_step { FENCED(WORKER); job = 0 };
#ifdef SILENT_JOB
        hint_workers(WORKER);
#else
        pass_on(WORKER);
#endif
        if
        :: true -> /* it never ends */
end_job:
            false
        :: true
        fi
    :: else
    fi;
visit:
    step(WORKER);
    if
    :: did && job -> pass_on(WORKER); goto look
    :: did && !job -> goto visit
    :: did ->
#ifdef SILENT_OVER
        hint_workers(WORKER);
#else
        pass_on(WORKER);
#endif
        goto end_job
    :: else
    fi;
    if
    :: job -> goto look
    :: else
    fi;
    word = bell;
    d_step { FENCED(WORKER); sleepers = sleepers + 1; announced = true };
    d_step { FENCED(WORKER); waking = 0 };
    if
    :: RUNS(WORKER) || job -> word = 0
    :: else ->
        d_step { worker_asleep = bell == word; word = 0 };
end_asleep:
        !worker_asleep
    fi;
    d_step { FENCED(WORKER); sleepers = sleepers - 1; announced = false };
    d_step { FENCED(WORKER); waking = 0 };
    goto look
}

proctype Guest() {
    byte w;
    bool found, did;
    d_step { FENCED(GUEST); did = place == 0; place = 1 };
    if
    :: did ->
        do
        :: did -> step(GUEST)
        :: true -> break
        od;
#ifdef SILENT_GUEST
        hint_workers(GUEST);
#else
        pass_on(GUEST);
#endif
        place = 0
    :: else
    fi
}

proctype Consumer() {
    byte word, w;
    bool found, did, mine, could;
next:
    if /* enter */
    :: !mine -> d_step { FENCED(CONSUMER); mine = place == 0; place = 1 }
    :: else
    fi;
    if
    :: mine && RUNS(CONSUMER) -> step(CONSUMER)
    :: else -> did = false
    fi;
    if
    :: LOAD(CONSUMER, SINK) == 1 -> goto done
    :: LOAD(CONSUMER, SINK) == 0 && did -> goto next
    :: else
    fi;
#ifndef LATE_FED
    word = fed;
#endif
    d_step { FENCED(CONSUMER); sleepers = sleepers + 16 };
#ifdef PLAIN_WAITING
    store(CONSUMER, WAITING, 1);
#else
    d_step { FENCED(CONSUMER); mem[WAITING] = 1 };
#endif
    if /* spdl__wake_passed */
    :: (sleepers & 15) > 0 && waking == 0 && RUNS(CONSUMER) -> wake_worker(CONSUMER)
    :: else
    fi;
#ifndef NO_RECHECK
    could = RUNS(CONSUMER);
#endif
#ifdef LATE_FED
    word = fed;
#endif
    if
    :: LOAD(CONSUMER, SINK) == 1 || (mine && could)
    :: else ->
        if
        :: mine -> pass_on(CONSUMER); mine = false; place = 0
        :: else
        fi;
        if
        :: could /* a look at the places from time to time */
        :: else ->
            consumer_asleep = fed == word;
end_asleep:
            !consumer_asleep
        fi
    fi;
    d_step { FENCED(CONSUMER); mem[WAITING] = 0; word = 0; could = false };
    d_step { FENCED(CONSUMER); sleepers = sleepers - 16 };
    if
    :: LOAD(CONSUMER, SINK) == 0 -> goto next
    :: else
    fi;
done:
    if
    :: mine ->
#ifndef NO_LEAVE_HINT
        pass_on(CONSUMER);
#endif
        place = 0
    :: else
    fi
}

/* Puts are looked at by spdl__wake_changed of >>wake-impl, the job by spdl_pool_submit. */
proctype Feeder() {
    byte put;
    bool found, submitted;
    do
    :: put < ITEMS ->
        store(FEEDER, IN(put), 1);
        put++;
#ifndef NO_PUT_FENCE
        FENCED(FEEDER);
#endif
        wake_rows(FEEDER)
#ifndef ALONE
    :: !submitted ->
        d_step { FENCED(FEEDER); job = 1; submitted = true };
        hint_workers(FEEDER)
#endif
    :: put == ITEMS -> break
    od
}

init {
    atomic {
#ifndef ALONE
        run Worker();
#endif
#ifndef NO_GUEST
        run Guest();
#endif
        run Consumer();
        run Feeder()
    }
    timeout;
    assert(!(worker_asleep && RUNS(0)));
    assert(!(consumer_asleep && RUNS(0)));
    assert(!(consumer_asleep && mem[SINK] == 1))
}
