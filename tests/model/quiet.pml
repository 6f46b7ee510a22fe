/* Quiet clients: spdl__client_stir, spdl__client_settle, spdl__pool_park of >>pool-impl and
   spdl__wake_look of >>wake-impl, for a pool of two workers with several clients.

   A worker that finds nothing in a client sets its bit in `quiet` and looks once more; from then on
   no worker looks at the client. A thread puts ITEMS items, one after the other: it stores, passes
   a full barrier, and if somebody sleeps or the bit is set it clears the bit and then wakes one
   worker, if there is something. Workers take items by a compare-and-swap, and look again after
   each. With -DALONE what is put can be done by worker 1 alone (a fini of it): who puts that wakes
   all.

   Checked: when nothing moves any more, everything that was put was taken, and a client that has
   something is not quiet.

   Switches that take out one part of the protocol, and must fail:
     NO_SECOND_LOOK  a worker sets the bit and does not look again
     PLAIN_BIT       it sets the bit, and the second look passes its store
     NO_STIR         who puts leaves the bit as it is
     LATE_STIR       it clears the bit after it has looked for sleepers and for work
     NO_PUT_FENCE    no full barrier between put and look
     NO_WAKE_ALL     (with ALONE) who clears the bit after its second look wakes nobody */

#ifndef ITEMS
#define ITEMS 2
#endif
#define PROCS 3
#define PUTTER 2
#define PUT 0
#define QUIET 1
#define ADDRESSES 2

/* only ever changed by read-modify-writes */
byte taken, sleepers, bell[2];
bit waking;

bool asleep[2];

#include "tso.pml"

#define HAS(p) (LOAD(p, PUT) > taken)
#ifdef ALONE
#define MINE(p) (HAS(p) && p == 1)
#else
#define MINE(p) HAS(p)
#endif

/* spdl__pool_wake: the first worker that sleeps */
inline wake_one(p) {
    d_step { FENCED(p); first = waking == 0; waking = 1 };
    if
    :: first ->
        d_step {
            first = false;
            if
            :: asleep[0] -> bell[0]++; asleep[0] = false
            :: !asleep[0] && asleep[1] -> bell[1]++; asleep[1] = false
            :: else -> bell[0]++; bell[1]++ /* others have yet to look */
            fi
        }
    :: else
    fi
}

proctype Worker(byte me) {
    byte word;
    bool found, first;
look:
    if
    :: LOAD(me, QUIET) == 0 ->
        do /* client->step */
        :: MINE(me) -> d_step { FENCED(me); taken = taken + (mem[PUT] > taken -> 1 : 0) }
        :: else -> break
        od;
        if /* settle */
        :: HAS(me)
        :: else ->
#ifdef PLAIN_BIT
            store(me, QUIET, 1);
#else
            d_step { FENCED(me); mem[QUIET] = 1 };
#endif
#ifndef NO_SECOND_LOOK
            if
            :: HAS(me) ->
                d_step { FENCED(me); mem[QUIET] = 0 };
#ifndef NO_WAKE_ALL
                d_step { bell[0]++; asleep[0] = false };
                d_step { bell[1]++; asleep[1] = false };
#endif
                goto look
            :: else
            fi
#endif
        fi
    :: else
    fi;
    /* park */
    word = bell[me];
    d_step { FENCED(me); sleepers++ };
    d_step { FENCED(me); waking = 0 };
    found = LOAD(me, QUIET) == 0 && MINE(me);
    if
    :: found -> d_step { found = false; word = 0 }
    :: else ->
        d_step { asleep[me] = bell[me] == word; word = 0 }
end_asleep:
        !asleep[me]
    fi;
    d_step { FENCED(me); sleepers-- };
    d_step { FENCED(me); waking = 0 };
    goto look
}

inline stir() {
    if
    :: LOAD(PUTTER, QUIET) == 1 -> d_step { FENCED(PUTTER); mem[QUIET] = 0 }
    :: else
    fi
}

inline look_for_sleepers() {
#ifdef ALONE
    d_step { bell[0]++; asleep[0] = false };
    d_step { bell[1]++; asleep[1] = false }
#else
    if
    :: sleepers > 0 && waking == 0 && LOAD(PUTTER, QUIET) == 0 && HAS(PUTTER) -> wake_one(PUTTER)
    :: else
    fi
#endif
}

proctype Putter() {
    byte put;
    bool first;
    do
    :: put == ITEMS -> break
    :: else ->
        put++;
        store(PUTTER, PUT, put);
#ifndef NO_PUT_FENCE
        FENCED(PUTTER);
#endif
        if
        :: sleepers > 0 || LOAD(PUTTER, QUIET) == 1 ->
#if !defined NO_STIR && !defined LATE_STIR
            stir();
#endif
            look_for_sleepers();
#ifdef LATE_STIR
            stir()
#endif
        :: else
        fi
    od
}

init {
    atomic {
        run Worker(0);
        run Worker(1);
        run Putter()
    }
    timeout;
    assert(taken == ITEMS);
    assert(taken == mem[PUT] || mem[QUIET] == 0)
}
