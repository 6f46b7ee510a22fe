/* Sleeping and waking with an event of >>os, as the MPMC ring of >>ring-core and >>ring-impl does
   it: WAITERS threads in spdl_ring_pop, PUSHERS threads in spdl_ring_try_push, and one that closes
   the ring.

   A push claims the next ticket and stamps its slot a little later, so a later slot may be ready
   before an earlier one; until the earlier one is stamped a pop finds the ring empty. Each sleep
   may last for ever or end with a timeout; who timed out tries once more.

   Checked: when nothing moves any more, nobody sleeps while the first item is there to be taken, or
   while the ring is closed and drained.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY       a waiter does a full barrier of its own instead of a heavy one
     NO_RECHECK     no second look after announcing the sleep
     LATE_WORD      the word is read after the second look
     NO_PASS_ON     a waiter that was woken, and leaves something behind, wakes nobody
     NO_PUSH_WAKES  a push that ends after a close wakes one waiter instead of all
   and two that make the model smaller:
     NO_CLOSE       nobody closes the ring
     NO_FIRST_TRY   no try before the first sleep is announced */

#ifndef WAITERS
#define WAITERS 2
#endif
#ifndef PUSHERS
#define PUSHERS 2
#endif
#define PROCS (WAITERS + PUSHERS)
#define STAMP(t) (t)
#define ADDRESSES (PUSHERS + 1)

/* only ever changed by read-modify-writes; `closed` is a bit of `tail` */
byte tail, head;
bool closed;
byte event_word, event_waiters;

bool asleep[WAITERS];

#include "tso.pml"

/* FUTEX_WAKE of one: any of them */
inline futex_wake_one() {
    if
    :: asleep[0] -> asleep[0] = false
    :: asleep[1] -> asleep[1] = false
#if WAITERS > 2
    :: asleep[2] -> asleep[2] = false
#endif
    :: else
    fi
}

inline futex_wake_all() {
    d_step {
        asleep[0] = false;
        asleep[1] = false;
#if WAITERS > 2
        asleep[2] = false
#endif
    }
}

/* spdl__ring_hint: only a compiler barrier before the look. `all` is looked at when there are
   waiters. */
inline notify(p, all) {
    if
    :: event_waiters == 0
    :: else ->
        to_all = all;
        d_step { FENCED(p); event_word++ };
        if
        :: to_all -> to_all = false; futex_wake_all()
        :: else -> atomic { futex_wake_one() }
        fi
    fi
}

#ifdef NO_PUSH_WAKES
#define WAKES_ALL false
#else
#define WAKES_ALL closed
#endif

#define EMPTY 0
#define TAKEN 1
#define CLOSED 2

/* spdl__mpmc_pop_n */
inline try_pop(p) {
    at = head;
    do
    :: LOAD(p, STAMP(at)) != 0 ->
        atomic { /* the compare-and-swap */
            FENCED(p);
            if
            :: head == at -> head++; result = TAKEN; break
            :: else -> at = head
            fi
        }
    :: else ->
        result = (closed && tail == at -> CLOSED : EMPTY);
        atomic {
            if
            :: head == at -> break
            :: else -> at = head; result = EMPTY
            fi
        }
    od;
    at = 0
}

/* spdl__ring_sleep */
proctype Waiter(byte me) {
    byte word, at, result;
    bool timed_out, to_all;
#ifndef NO_FIRST_TRY
    try_pop(me);
    if
    :: result != EMPTY -> goto done
    :: else
    fi;
#endif
    do
    :: timed_out -> break
    :: else ->
        /* says that it is about to sleep */
#ifndef LATE_WORD
        word = event_word;
#endif
        d_step { FENCED(me); event_waiters++ };
#ifdef NO_HEAVY
        FENCED(me);
#else
        membarrier(me);
#endif
#ifndef NO_RECHECK
        try_pop(me);
        if
        :: result != EMPTY -> d_step { FENCED(me); event_waiters-- }; break
        :: else
        fi;
#endif
#ifdef LATE_WORD
        word = event_word;
#endif
        /* spdl__os_event_sleep */
        d_step { FENCED(me); asleep[me] = event_word == word; word = 0 };
        if
        :: true ->
end_asleep:
            !asleep[me]
        :: true -> d_step { timed_out = asleep[me]; asleep[me] = false }
        fi;
        d_step { FENCED(me); event_waiters-- };
        try_pop(me);
        if
        :: result == EMPTY
        :: else ->
#ifndef NO_PASS_ON
            if
            :: result == TAKEN && head < tail -> notify(me, false)
            :: else
            fi;
#endif
            break
        fi
    od;
#ifndef NO_FIRST_TRY
done:
#endif
    atomic { result = 0; word = 0; timed_out = false }
}

/* spdl__mpmc_push_n and spdl__ring_hint after it */
proctype Pusher(byte me) {
    byte ticket;
    bool refused, to_all;
    d_step {
        FENCED(me);
        refused = closed;
        ticket = tail;
        tail = (closed -> tail : tail + 1)
    };
    if
    :: refused
    :: else ->
        store(me, STAMP(ticket), 1);
        notify(me, WAKES_ALL)
    fi
}

/* spdl_ring_close. It stores nothing that waits in a buffer. */
proctype Closer() {
    closed = true;
    if
    :: event_waiters == 0
    :: else -> event_word++; futex_wake_all()
    fi
}

#if WAITERS > 2
#define ASLEEP (asleep[0] || asleep[1] || asleep[2])
#else
#define ASLEEP (asleep[0] || asleep[1])
#endif

init {
    atomic {
        run Waiter(0);
        run Waiter(1);
#if WAITERS > 2
        run Waiter(2);
#endif
        run Pusher(WAITERS);
        run Pusher(WAITERS + 1);
#if PUSHERS > 2
        run Pusher(WAITERS + 2);
#endif
#ifndef NO_CLOSE
        run Closer()
#endif
    }
    timeout;
    assert(!(ASLEEP && mem[STAMP(head)] != 0));
    assert(!(ASLEEP && closed && head == tail))
}
