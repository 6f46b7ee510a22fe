/* A turn beside park and wake: spdl__worker_run, spdl__pool_park and spdl__pool_wake of
   >>pool-impl, with spdl__turn of >>core-impl.

   Two workers look for items. A worker that finds none gives a turn and looks again, or gives none
   because a long turn has barred them, then parks. A worker that was woken gives a turn, or none,
   before it looks. A turn may take any time: all other threads may do any number of steps in it.
   Two putters put ITEMS items each: store, full barrier, look at who sleeps. A worker may stay in
   its call for ever: what else was put is for the other one.

   Checked: when nothing moves any more, every item was taken, unless both workers are in calls that
   do not end; and no worker sleeps while there is an item.

   Switches that take out one part of the protocol, and must fail:
     NO_RECHECK    no look between the announcement and the sleep
     LATE_CLEAR    a woken worker gives its turn and looks, and `waking` is not cleared before that
     LATE_WORD     the turn before the sleep comes after the last look, and the bell is read after
                   the turn
     NO_PUT_FENCE  no full barrier between put and look */

#ifndef ITEMS
#define ITEMS 2
#endif
#define PROCS 4
#define PUT(i) (i) /* by putter i */
#define ADDRESSES 2

/* only ever changed by read-modify-writes */
byte taken, sleepers, bell[2];
bit waking, barred;

bool asleep[2], announced[2], stuck[2];

#include "tso.pml"

#define HAS(p) (LOAD(p, PUT(0)) + LOAD(p, PUT(1)) > taken)

/* Another thread may do anything meanwhile. A long one bars turns for a while. */
inline turn() {
    if
    :: barred -> skip
    :: !barred -> skip
    :: !barred -> barred = 1
    :: barred -> barred = 0
    fi
}

/* the first worker that is announced */
inline wake_one(p) {
    d_step { FENCED(p); first = waking == 0; waking = 1 };
    if
    :: first ->
        d_step {
            first = false;
            if
            :: announced[0] -> announced[0] = false; bell[0]++; asleep[0] = false
            :: !announced[0] && announced[1] -> announced[1] = false; bell[1]++; asleep[1] = false
            :: else -> waking = 0 /* others have yet to look */
            fi
        }
    :: else
    fi
}

inline hint(p) {
    if
    :: sleepers > 0 && waking == 0 && HAS(p) -> wake_one(p)
    :: else
    fi
}

proctype Worker(byte me) {
    byte word;
    bool found, first;
look:
    do
    :: HAS(me) ->
        d_step { FENCED(me); found = mem[PUT(0)] + mem[PUT(1)] > taken; taken = taken + found };
        if
        :: found ->
            found = false;
            hint(me); /* the first take of a sitting looks at everything */
            if
            :: true
            :: true -> /* a call that does not end */
                stuck[me] = true;
                goto done
            fi
        :: else
        fi
    :: else -> break
    od;
    turn();
    do
    :: HAS(me) -> goto look
    :: else -> break
    od;
#ifndef LATE_WORD
    word = bell[me];
#endif
    announced[me] = true;
    d_step { FENCED(me); sleepers++ };
    d_step { FENCED(me); waking = 0 };
#ifndef NO_RECHECK
    found = HAS(me);
#endif
#ifdef LATE_WORD
    turn();
    word = bell[me];
#endif
    if
    :: found -> d_step { found = false; word = 0 }
    :: else ->
        d_step { asleep[me] = bell[me] == word; word = 0 }
end_asleep:
        !asleep[me]
    fi;
    d_step { FENCED(me); sleepers-- };
    announced[me] = false;
#ifndef LATE_CLEAR
    d_step { FENCED(me); waking = 0 };
#endif
    turn();
    goto look;
done:
    skip
}

proctype Putter(byte me) {
    byte put;
    bool first;
    do
    :: put == ITEMS -> break
    :: else ->
        put++;
        store(me, PUT(me - 2), put);
#ifndef NO_PUT_FENCE
        FENCED(me);
#endif
        hint(me)
    od
}

init {
    atomic {
        run Worker(0);
        run Worker(1);
        run Putter(2);
        run Putter(3)
    }
    timeout;
    assert(taken == 2 * ITEMS || (stuck[0] && stuck[1])); /* else one is asleep, and could */
}
