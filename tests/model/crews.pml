/* Two crews of one pipeline: rows with threads of their own beside the pool, or beside the trainer
   when it is the worker. spdl__pipeline_step and spdl__pipeline_hint of >>flow-impl, with
   spdl__pool_sleep and spdl__pool_hint of >>pool-impl, and spdl__next_sleep of >>pipeline-impl.

   Crew 0 has one worker, which runs the first and the last row: a source of ITEMS items, and a
   merge that takes them. Crew 1 has one worker for the row between, which hands on an item or drops
   it, which leaves a hole. Both edges have room for one. A call may never end, as in park.pml.
     -DINLINE     crew 0 is the trainer, with workers = 0

   Checked: when nothing moves any more, no row is runnable while its crew is asleep.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY        a sleeper does a full barrier of its own instead of a heavy one
     NO_RECHECK      no second look before the sleep
     NO_CLAIM_HINT   no hint between claim and call
     NO_STEP_HINT    no hint after a step: the other crew is left to look for itself
     SILENT_HOLES    a step that has only passed over holes is none
     DEAF            (with INLINE) nobody wakes the trainer but with an item in the sink */

#ifndef ITEMS
#define ITEMS 3
#endif
#define PROCS 2
#define PUT(e) (e) /* edge 0: source to the row between; edge 1: from there to the merge */
#define HEAD(e) (2 + (e))
#define WAKING(c) (4 + (c))
#define KIND(t) (6 + (t)) /* of ticket t on edge 1 */
#define ADDRESSES (6 + ITEMS)
#define ITEM 1
#define HOLE 2

/* only ever changed by read-modify-writes */
byte sleepers[2], bell[2];

bool asleep[2];
byte made; /* by the source */

#include "tso.pml"

/* spdl__node_runnable of the rows of a crew */
#define SOURCE_RUNS(p) (made < ITEMS && LOAD(p, PUT(0)) == LOAD(p, HEAD(0)))
#define BETWEEN_RUNS(p)                                                                            \
    (LOAD(p, PUT(0)) > LOAD(p, HEAD(0)) && LOAD(p, PUT(1)) == LOAD(p, HEAD(1)))
#define MERGE_RUNS(p) (LOAD(p, PUT(1)) > LOAD(p, HEAD(1)))

inline crew_runnable(p, c) {
    if
    :: c == 1 -> found = BETWEEN_RUNS(p)
    :: else ->
        found = MERGE_RUNS(p);
        if
        :: !found -> found = SOURCE_RUNS(p)
        :: else
        fi
    fi
}

/* spdl__pool_hint for the other crew; the own one has but this worker */
inline hint(p, c) {
    if
    :: sleepers[c] == 0
    :: else ->
#ifdef INLINE
        if
        :: c == 0 -> /* spdl__event_notify */
#ifndef DEAF
            d_step { FENCED(p); bell[0]++ };
            asleep[0] = false
#else
            skip
#endif
        :: else ->
#endif
        FENCED(p);
        if
        :: LOAD(p, WAKING(c)) != 0
        :: else ->
            crew_runnable(p, c);
            if
            :: found ->
                d_step { FENCED(p); found = mem[WAKING(c)] == 0; mem[WAKING(c)] = 1 };
                if
                :: found -> d_step { bell[c]++; found = false }; asleep[c] = false
                :: else
                fi
            :: else
            fi
        fi
#ifdef INLINE
        fi
#endif
    fi
}

inline claim_hint(p, c) {
#ifdef NO_CLAIM_HINT
    skip
#else
    hint(p, c)
#endif
}

inline call() {
    if
    :: true -> skip
    :: true ->
end_in_call:
        false
    fi
}

/* spdl__pool_sleep, or spdl__next_sleep of a trainer that is the worker */
inline sleep(p) {
    d_step { word = bell[p]; found = false };
    d_step { FENCED(p); sleepers[p]++ };
    store(p, WAKING(p), 0);
#ifdef NO_HEAVY
    FENCED(p);
#else
    membarrier(p);
#endif
#ifndef NO_RECHECK
    crew_runnable(p, p);
#endif
    if
    :: found -> word = 0
    :: else ->
        d_step { FENCED(p); asleep[p] = bell[p] == word; word = 0 };
end_asleep:
        !asleep[p]
    fi;
    d_step { FENCED(p); sleepers[p]--; found = false };
    store(p, WAKING(p), 0);
    FENCED(p)
}

/* Rows without calls (the merge) do all in a step; downstream first. */
proctype First() {
    byte word, at;
    bool found, done;
    do
    :: true ->
        done = false;
        if
        :: MERGE_RUNS(0) ->
            at = LOAD(0, HEAD(1));
            done = LOAD(0, KIND(at)) == ITEM;
#ifndef SILENT_HOLES
            done = true;
#endif
            at = at + 1;
            store(0, HEAD(1), at)
        :: else ->
            if
            :: SOURCE_RUNS(0) ->
                done = true;
                made++;
                claim_hint(0, 1);
                call();
                at = made;
                store(0, PUT(0), at)
            :: else
            fi
        fi;
        at = 0;
        if
        :: done ->
#ifndef NO_STEP_HINT
            hint(0, 1)
#else
            skip
#endif
        :: else ->
            if
            :: MERGE_RUNS(0) || SOURCE_RUNS(0) -> skip
            :: else -> sleep(0)
            fi
        fi
    od
}

proctype Second() {
    byte word, at, ticket;
    bool found;
    do
    :: BETWEEN_RUNS(1) ->
        ticket = LOAD(1, HEAD(0));
        at = ticket + 1;
        store(1, HEAD(0), at);
        FENCED(1); /* the lock of the row is taken and given back around it */
        claim_hint(1, 0);
        call();
        if
        :: at = ITEM
        :: at = HOLE
        fi;
        store(1, KIND(ticket), at);
        at = ticket + 1;
        store(1, PUT(1), at);
        d_step { at = 0; ticket = 0 };
#ifndef NO_STEP_HINT
        hint(1, 0)
#endif
    :: else -> sleep(1)
    od
}

init {
    atomic {
        run First();
        run Second()
    }
    timeout;
    assert(!(asleep[0] && (MERGE_RUNS(0) || SOURCE_RUNS(0))));
    assert(!(asleep[1] && BETWEEN_RUNS(0)))
}
