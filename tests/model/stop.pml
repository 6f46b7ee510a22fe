/* Stopping: spdl_pipeline_stop with spdl__pipeline_await_quiet, against spdl__node_claim and
   spdl__node_leave of >>pipeline-impl. Two workers, one stage with concurrency 2, a thread that
   stops and one that stops with a timeout.

   Checked: once a stop has returned no call is under way and none begins; and when nothing moves
   any more, no stop sleeps although all calls have ended.

   Switches that take out one part of the protocol, and must fail:
     NO_LOCK      a stop does not go through the lock of the stage
     EARLY_LOOK   a call that ends looks for a stop before it counts itself out
     LATE_WORD    the word is read after the look at `active` */

#define PROCS 2 /* those with a buffer; a stop does nothing but read-modify-writes and loads */
#define LOCK 0
#define ADDRESSES 1
#define CALLS 2 /* of each worker */

/* only ever changed by read-modify-writes */
byte active_calls;
bool stopping;
byte quiet;

bool asleep[2];
bool returned;

#include "tso.pml"

proctype Worker(byte me) {
    byte calls;
    bool seen;
    do
    :: calls == CALLS -> break
    :: else ->
        calls++;
        if
        :: LOAD(me, LOCK) != 0 -> goto next
        :: else
        fi;
        d_step { FENCED(me); seen = mem[LOCK] != 0; mem[LOCK] = 1 };
        if
        :: seen -> goto next
        :: else
        fi;
        seen = stopping;
        if
        :: !seen -> d_step { FENCED(me); active_calls++ }
        :: else
        fi;
        store(me, LOCK, 0);
        if
        :: seen -> goto next
        :: else
        fi;
        assert(!returned); /* the call */
        assert(!returned);
#ifdef EARLY_LOOK
        seen = stopping;
        d_step { FENCED(me); active_calls-- }
#else
        d_step { FENCED(me); active_calls-- };
        seen = stopping;
#endif
        if
        :: seen -> d_step { FENCED(me); quiet++ }; d_step { asleep[0] = false; asleep[1] = false }
        :: else
        fi;
next:
        seen = false
    od
}

/* A stop may come at any moment; the second one may give up. */
proctype Stopper(byte me) {
    byte word;
    bool slept;
    stopping = true;
    do
    :: true ->
#ifndef LATE_WORD
        word = quiet;
#endif
#ifndef NO_LOCK
        d_step { mem[LOCK] == 0 -> mem[LOCK] = 1 };
        mem[LOCK] = 0; /* a later one, from a buffer, would only keep the others out longer */
#endif
        if
        :: active_calls == 0 -> returned = true; break
        :: else ->
            if
            :: slept -> break
            :: else
            fi;
#ifdef LATE_WORD
            word = quiet;
#endif
            d_step { asleep[me] = quiet == word; word = 0 };
            if
            :: true ->
end_asleep:
                !asleep[me]
            :: me == 1 -> d_step { slept = asleep[1]; asleep[1] = false }
            fi
        fi
    od
}

init {
    atomic {
        run Worker(0);
        run Worker(1);
        run Stopper(0);
        run Stopper(1)
    }
    timeout;
    assert(!((asleep[0] || asleep[1]) && active_calls == 0))
}
