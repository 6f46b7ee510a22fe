/* Workers that start while a pipeline runs: spdl__row_judge and spdl__growth_start of >>grow-impl,
   spdl__pool_grow, spdl__pool_park and spdl__pool_release of >>pool-impl, against a put, and
   spdl_pipeline_set_concurrency and spdl_pipeline_destroy of >>stop-impl.

   Two workers are inside of the client, or come too late for it. Each has left a sitting and tries
   to judge the row. One that gets `growing` raises the limit by one. After that it sets `starting`,
   if no other has, and starts extra workers until there is one for each call above the first limit;
   it clears `starting` and looks at the limit again. Its next call waits until an extra worker has
   served the input that the owner puts. The owner also may set the limit at any moment, under
   `growing`, which is final. At last it detaches the client, waits for the workers inside, has the
   extra workers quit, and joins them.

   Checked: when nothing moves any more, destroy has returned; the limit is the owner's if it has
   set one, else there are as many extra workers as the limit wants; no two get one place, and none
   starts after the pool is gone.

   Switches that take out one part of the protocol, and must fail:
     NO_GROWING    two workers may judge at the same time
     NO_STARTING   two workers may start others at the same time
     NO_SECOND     the one that starts them does not look at the limit again
     NO_WAIT       destroy does not wait for the workers inside
     SILENT_QUIT   nobody wakes an extra worker that has to quit
     NO_RECHECK    an extra worker does not look again before it sleeps
     LATE_COUNT    an extra worker is counted after it has started, and nobody looks again
     BLIND         the judge does not look whether the limit is the owner's
     NO_LOCK       the owner sets the limit without `growing` */

#define PROCS 5
#define OWNER 4
#define LIMIT 0
#define FIXED 1
#define EXTRAS 2
#define QUIT 3
#define GONE 4 /* the client is detached */
#define WORK 5
#define GROWING 6
#define STARTING 7
#define ADDRESSES 8
#define ASKED 3 /* the owner's limit; the first one is 0 */

/* only ever changed by read-modify-writes: those inside of the client, sleepers, bells */
byte inside, bell[2];
bool announced[2], asleep[2], taken[2], gone[2], set, served, returned, over;

#define STORES_WAIT
#include "tso.pml"

/* extra workers for the limit; the owner's wants none */
#define WANTED(p) (LOAD(p, LIMIT) == ASKED -> 0 : LOAD(p, LIMIT))
#ifdef BLIND
#define BLINDLY true
#else
#define BLINDLY false
#endif

inline ring(i) {
    if
    :: d_step { announced[i] -> announced[i] = false; bell[i]++; asleep[i] = false }
    :: else
    fi
}

/* After a put, or a new limit. */
inline look(p) {
    FENCED(p);
    if
    :: LOAD(p, WORK) == 1 && LOAD(p, EXTRAS) > 0 -> ring(0)
    :: else
    fi;
    if
    :: LOAD(p, WORK) == 1 && LOAD(p, EXTRAS) > 1 -> ring(1)
    :: else
    fi
}

proctype Extra(byte i) {
    byte word;
    bool found;
    do
    :: LOAD(2 + i, QUIT) -> break
    :: else ->
        d_step {
            FENCED(2 + i);
            found = mem[WORK] == 1;
            mem[WORK] = (found -> 0 : mem[WORK])
        };
        if
        :: found -> served = true
        :: else ->
            word = bell[i];
            d_step { FENCED(2 + i); announced[i] = true };
            if
#ifndef NO_RECHECK
            :: LOAD(2 + i, QUIT) || LOAD(2 + i, WORK) == 1
#endif
            :: else ->
                d_step { asleep[i] = bell[i] == word };
                !asleep[i]
            fi;
            announced[i] = false
        fi
    od;
    gone[i] = true
}

proctype Judge(byte p) {
    byte at;
    bool got, raised, started;
    d_step { FENCED(p); inside++ };
    if
    :: LOAD(p, GONE) -> goto leaves
    :: else
    fi;
    d_step {
        FENCED(p);
        got = mem[GROWING] == 0;
#ifdef NO_GROWING
        got = true;
#endif
        mem[GROWING] = 1
    };
    if
    :: got ->
        if
#ifndef BLIND
        :: LOAD(p, FIXED)
#endif
        :: !LOAD(p, FIXED) || BLINDLY ->
            at = (LOAD(p, FIXED) -> 0 : LOAD(p, LIMIT));
            store(p, LIMIT, at + 1);
            raised = true
        fi;
        store(p, GROWING, 0)
    :: else
    fi;
    do
    :: !raised -> break
    :: else ->
        d_step {
            FENCED(p);
            got = mem[STARTING] == 0;
#ifdef NO_STARTING
            got = true;
#endif
            mem[STARTING] = 1
        };
        if
        :: !got -> break
        :: else
        fi;
        do
        :: LOAD(p, EXTRAS) >= WANTED(p) -> break
        :: else ->
            at = LOAD(p, EXTRAS);
            assert(!taken[at]);
            taken[at] = true;
#ifndef LATE_COUNT
            store(p, EXTRAS, at + 1);
#endif
            FENCED(p);
            assert(!returned);
            run Extra(at);
#ifdef LATE_COUNT
            store(p, EXTRAS, at + 1);
#endif
            started = true
        od;
        skip;
        d_step { FENCED(p); mem[STARTING] = 0 };
#ifdef NO_SECOND
        break;
#endif
        if
        :: LOAD(p, EXTRAS) >= WANTED(p) -> break
        :: else
        fi
    od;
#ifndef LATE_COUNT
    if
    :: started -> look(p)
    :: else
    fi;
#endif
    if
    :: started -> served /* by another call */
    :: else
    fi;
leaves:
    skip;
    d_step { FENCED(p); inside-- }
}

inline sets() {
#ifndef NO_LOCK
    d_step { FENCED(OWNER) && mem[GROWING] == 0; mem[GROWING] = 1 };
#endif
    store(OWNER, FIXED, 1);
    store(OWNER, LIMIT, ASKED);
#ifndef NO_LOCK
    store(OWNER, GROWING, 0);
#endif
    set = true
}

proctype Owner() {
    if
    :: sets(); store(OWNER, WORK, 1)
    :: store(OWNER, WORK, 1)
    fi;
    look(OWNER);
    store(OWNER, GONE, 1);
    FENCED(OWNER);
#ifndef NO_WAIT
    inside == 0;
#endif
    store(OWNER, QUIT, 1);
    FENCED(OWNER);
#ifndef SILENT_QUIT
    if
    :: LOAD(OWNER, EXTRAS) > 0 -> ring(0)
    :: else
    fi;
    if
    :: LOAD(OWNER, EXTRAS) > 1 -> ring(1)
    :: else
    fi;
#endif
    (LOAD(OWNER, EXTRAS) == 0 || gone[0]) && (LOAD(OWNER, EXTRAS) < 2 || gone[1]);
    returned = true
}

init {
    atomic {
        run Judge(0);
        run Judge(1);
        run Owner()
    }
    timeout;
    assert(returned);
    assert(inside == 0);
    assert((!taken[0] || gone[0]) && (!taken[1] || gone[1]));
    over = (set -> mem[LIMIT] == ASKED : mem[EXTRAS] == mem[LIMIT]);
    assert(over)
}
