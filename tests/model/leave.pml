/* Leaving a source that blocks: spdl__call_begins and spdl__call_is_back of >>call-impl, and
   spdl__producer_main of >>producer-impl, against spdl_pipeline_destroy, spdl__destroy_leaves and
   spdl__pipeline_await of >>stop-impl.

   One source on a thread of its own. `active` in the word of its row, here `inside`, is 2 during a
   call (1 and SPDL__BLOCKING), 1 before and after it, and else 0. The call returns at any moment,
   or never. Between calls the thread sleeps while the row is shut. One thread stops and destroys
   at any moment: it adds a reference for the source, has it quit, shuts the row, and wakes it. At
   some later moment it tries once to leave the source in its call: `inside` from 2 to 0. Then it
   waits until the row is quiet, joins a thread that it has not left, and frees the pool. Each
   thread drops a reference.

   Checked: when nothing moves any more destroy has returned, whatever the call does; no call begins
   after it has; what a call returns that was left is freed, not settled (which may log); nobody
   uses the pool after it was freed, nor the pipeline, which is freed once when both have ended.

   Switches that take out one part of the protocol, and must fail:
     NO_LOOK       a call begins in a row that is shut
     ONE_STATE     destroy leaves a thread that is inside, but not in its call
     BLIND_RETURN  the source does not look whether it was left when its call has returned
     LATE_QUIT     the source has to quit only after it was left
     SILENT_QUIT   nobody wakes a source that waits
     NO_RECHECK    the source does not look again before it sleeps
     LATE_WORD     `quiet` is read after the look at the row
     NO_REFERENCE  the thread has no reference */

#define PROCS 2
#define ADDRESSES 2
#define QUITS 0
#define WAITS 1

/* only ever changed by read-modify-writes: the word of the row, events, references */
bool shut;
byte inside, quiet, room, refs = 1, freed;
bool asleep, source_asleep, abandoned, returned, back, gone, pool_freed;

#include "tso.pml"

inline drop(p) {
    d_step {
        assert(freed == 0);
        refs--;
        freed = freed + (refs == 0 -> 1 : 0)
    }
}

proctype Source() {
    byte word;
    bool may;
    do
    :: LOAD(0, QUITS) -> break
    :: else ->
        d_step {
            FENCED(0);
            may = !shut && inside == 0;
            inside = (may -> 1 : inside)
        };
        if
        :: !may -> /* waits */
            word = room;
            assert(!pool_freed); /* counts as a sleeper */
            d_step { FENCED(0); mem[WAITS] = 1 };
            if
#ifndef NO_RECHECK
            :: LOAD(0, QUITS) || !shut
#endif
            :: else ->
                d_step { source_asleep = room == word };
                !source_asleep
            fi;
            store(0, WAITS, 0);
            assert(!pool_freed);
            word = 0
        :: else ->
            assert(!pool_freed); /* looks for sleepers */
            d_step {
                FENCED(0);
                may = !shut;
#ifdef NO_LOOK
                may = true;
#endif
                inside = (may -> 2 : inside);
                assert(!may || !returned)
            };
            if
            :: may ->
                if
                :: skip          /* it returns */
                :: goto for_ever /* it does not */
                fi;
                d_step { back = true; assert(freed == 0) };
                d_step {
                    FENCED(0);
                    may = inside != 0;
#ifdef BLIND_RETURN
                    may = true;
#endif
                    inside = (may -> 1 : inside)
                };
                assert(!may || !returned); /* settled */
                if
                :: !may -> goto again /* the row is out of bounds */
                :: else
                fi;
                back = false
            :: else
            fi;
            assert(!pool_freed);
            d_step {
                FENCED(0);
                inside = 0;
                may = shut
            };
            if
            :: may -> d_step { quiet++; asleep = false }
            :: else
            fi
        fi;
again:
        may = false
    od;
    assert(freed == 0);
    drop(0);
    gone = true;
for_ever:
    skip
}

proctype Destroyer() {
    byte word;
    if
    :: shut = true /* stopped before */
    :: skip
    fi;
#ifndef NO_REFERENCE
    refs++;
#endif
#ifndef LATE_QUIT
    store(1, QUITS, 1);
#endif
    d_step { FENCED(1); shut = true };
#ifndef SILENT_QUIT
    if
    :: LOAD(1, WAITS) ->
        d_step { FENCED(1); mem[WAITS] = 0 };
        d_step { room++; source_asleep = false }
    :: else
    fi;
#endif
    d_step {
        FENCED(1);
        abandoned = inside == 2;
#ifdef ONE_STATE
        abandoned = inside != 0;
#endif
        inside = (abandoned -> 0 : inside)
    };
    do
    :: true ->
#ifndef LATE_WORD
        word = quiet;
#endif
        if
        :: inside == 0 -> break
        :: else
        fi;
#ifdef LATE_WORD
        word = quiet;
#endif
        atomic { asleep = word == quiet };
        !asleep
    od;
#ifdef LATE_QUIT
    store(1, QUITS, 1);
    FENCED(1);
    if
    :: LOAD(1, WAITS) ->
        d_step { FENCED(1); mem[WAITS] = 0 };
        d_step { room++; source_asleep = false }
    :: else
    fi;
#endif
    if
    :: abandoned
    :: else -> gone
    fi;
    pool_freed = true;
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
