/* Leaving a source that blocks: spdl__call_may_block and spdl__call_is_back of >>rare-impl, and
   spdl__producer_main of >>producer-impl, against spdl__destroy_await, spdl__destroy_abandons,
   spdl__pipeline_await_quiet and spdl__pipeline_drop of >>stop-impl.

   One source on a thread of its own, which is inside its row and about to call. The call returns at
   any moment, or never. One thread destroys at any moment: it stops, then waits until the row is
   quiet or abandons the call. It adds a reference for the thread before the swap that abandons, and
   takes it back if that fails. A thread whose call was abandoned drops that reference at once, and
   ends; the other one is joined.

   Checked: when nothing moves any more destroy has returned, whatever the call does; no call begins
   after it has, except one that it has abandoned; what an abandoned call returns is freed, not
   settled (which may log); nobody uses the pipeline after it was freed, and it was freed once when
   the call has returned.

   Switches that take out one part of the protocol, and must fail:
     PLAIN_CALLING   `calling` is stored without a barrier
     NO_LOOK         the source does not look for a stop before it calls
     BLIND_RETURN    nor whether it was abandoned when the call has returned
     LATE_WORD       `quiet` is read after the look at the row
     NO_REFERENCE    an abandoned thread has no reference */

#define PROCS 2
#define ADDRESSES 2
#define STOPPING 0
#define CALLING 1 /* 2: abandoned */

bool inside = true; /* only ever changed by read-modify-writes */
byte quiet, refs = 1, freed;
bool asleep, abandoned, returned, back, gone, quit;

#include "tso.pml"

inline drop(p) {
    d_step {
        assert(freed == 0);
        refs--;
        freed = freed + (refs == 0 -> 1 : 0)
    }
}

proctype Source() {
    byte was;
#ifdef PLAIN_CALLING
    store(0, CALLING, 1);
#else
    d_step { FENCED(0); mem[CALLING] = 1 };
#endif
#ifndef NO_LOOK
    if
    :: LOAD(0, STOPPING) -> d_step { FENCED(0); was = mem[CALLING]; mem[CALLING] = 0 }; goto over
    :: else
    fi;
#endif
    assert(!returned || abandoned); /* calls none, or one that counts as begun */
    if
    :: skip          /* it returns */
    :: goto for_ever /* it does not */
    fi;
    back = true;
    d_step { FENCED(0); was = mem[CALLING]; mem[CALLING] = 0 };
#ifdef BLIND_RETURN
    was = 1;
#endif
    assert(freed == 0);
    assert(was == 2 || !returned); /* settled */
over:
    if
    :: was == 2 -> drop(0); gone = true; goto for_ever
    :: else
    fi;
    d_step { FENCED(0); assert(freed == 0); inside = false };
    d_step { quiet++; asleep = false };
    quit;
    gone = true;
for_ever:
    skip
}

proctype Destroyer() {
    byte word;
    store(1, STOPPING, 1);
    FENCED(1);
    do
    :: true ->
#ifndef LATE_WORD
        word = quiet;
#endif
        if
        :: !inside -> break
        :: else
        fi;
#ifndef NO_REFERENCE
        refs++;
#endif
        d_step {
            FENCED(1);
            abandoned = mem[CALLING] == 1;
            mem[CALLING] = (mem[CALLING] == 1 -> 2 : mem[CALLING])
        };
        if
        :: abandoned -> break
        :: else
        fi;
#ifndef NO_REFERENCE
        drop(1);
#endif
#ifdef LATE_WORD
        word = quiet;
#endif
        atomic { asleep = word == quiet };
        !asleep
    od;
    quit = true;
    if
    :: abandoned
    :: else -> gone
    fi;
    drop(1);
    returned = true
}

init {
    atomic {
        run Source();
        run Destroyer()
    }
    timeout;
    assert(returned);
    assert(freed == (abandoned && !gone -> 0 : 1));
    assert(gone || (abandoned && !back)) /* inside its call for ever */
}
