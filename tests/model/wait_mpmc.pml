/* Waiting on an MPMC ring, both sides at a small capacity: spdl__mpmc_push_n, spdl__mpmc_pop_n,
   spdl__ring_wait and spdl__ring_hint, with PUSHERS threads that push BATCH items each, POPPERS
   threads that pop one, and one that closes the ring.

   A push claims tickets and stamps the slots a little later, so a later slot may be ready before an
   earlier one; until the earlier one is stamped a pop finds the ring empty. The same on the other
   side. Each sleep may last for ever or end with a timeout; whoever wakes up tries once more.

   Checked: when nothing moves any more, no pop sleeps while the first item is there to be taken, no
   push sleeps while the next slot is free, and nobody sleeps after a close; nothing is accepted
   once a close has returned; whoever is told the end comes after the last item.

   FENCE: light and heavy barriers are both full ones, instead of none and membarrier.
   WAKE_ONE: a batch wakes one, not min(n, waiters). Passing on makes up for that, so this holds
   too, but not with NO_PASS_ON.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY       a waiter does a full barrier of its own instead of a heavy one
     NO_RECHECK     no second look after prepare
     LATE_WORD      the word is read after the second look
     NO_PASS_ON     a waiter that was woken, and leaves something behind, wakes nobody
     NO_PUSH_WAKES  a push that ends after a close wakes one waiter instead of all
     NO_LAST_TRY    whoever wakes up late gives up without another try
     NO_MARK        a push claims without regard to the mark
     CLOSE_WAKES_ONE  closing wakes one of each side
   and those that make the model smaller:
     NO_CLOSE       nobody closes the ring
     NO_TIMEOUT     no sleep times out */

#ifndef PUSHERS
#define PUSHERS 2
#endif
#ifndef POPPERS
#define POPPERS 2
#endif
#ifndef CAPACITY
#define CAPACITY 1
#endif
#ifndef BATCH
#define BATCH 1
#endif

#define PROCS (PUSHERS + POPPERS)
#define STAMP(at) ((at) % CAPACITY) /* 2 * at: free for that push; one more: filled */
#define ADDRESSES (CAPACITY + 1)

/* only ever changed by read-modify-writes; `closed` is a bit of `tail` */
byte tail, head;
bool closed, returned;

typedef Event {
    byte word, waiters
}
Event not_empty, not_full;

bool asleep[PROCS]; /* pushers come first */

#include "tso.pml"

#ifdef FENCE
#define LIGHT(p) FENCED(p)
#else
#define LIGHT(p) true
#endif

#ifdef NO_PUSH_WAKES
#define WAKES_ALL false
#else
#define WAKES_ALL closed
#endif

#define GO 0
#define WAIT 1 /* full, empty */
#define OVER 2 /* closed */

/* FUTEX_WAKE of one: any of them */
inline wake_one(first, last) {
    if
    :: asleep[first] -> asleep[first] = false
    :: asleep[last] -> asleep[last] = false
    :: else
    fi
}

inline wake(first, last, count) {
    atomic {
        wake_one(first, last);
        if
        :: count > 1 -> wake_one(first, last)
        :: else
        fi;
        count = 0
    }
}
#define WAKE_PUSHERS(count) wake(0, PUSHERS - 1, count)
#define WAKE_POPPERS(count) wake(PUSHERS, PROCS - 1, count)

/* spdl__ring_hint; `closed` is looked at when there are waiters */
inline notify_poppers(p, count) {
    LIGHT(p);
    if
    :: not_empty.waiters == 0 -> count = 0
    :: else ->
        count = (WAKES_ALL -> 2 : count);
        d_step { FENCED(p); not_empty.word++ };
        WAKE_POPPERS(count)
    fi
}

inline notify_pushers(p, count) {
    LIGHT(p);
    if
    :: not_full.waiters == 0 -> count = 0
    :: else ->
        d_step { FENCED(p); not_full.word++ };
        WAKE_PUSHERS(count)
    fi
}

#ifdef WAKE_ONE
#define WAKES(n) 1
#else
#define WAKES(n) n /* there are at most two to wake */
#endif
#ifdef NO_MARK
#define MARKED false
#else
#define MARKED closed
#endif

inline try_push(p) {
    at = tail;
    do
    :: MARKED -> result = OVER; break
    :: LOAD(p, STAMP(at)) == 2 * at ->
        n = 1;
#if BATCH > 1 && CAPACITY > 1
        if
        :: left > 1 && LOAD(p, STAMP(at + 1)) == 2 * at + 2 -> n = 2
        :: else
        fi;
#endif
        atomic { /* the compare-and-swap */
            FENCED(p);
            if
            :: tail == at && !MARKED ->
                assert(!returned);
                tail = tail + n;
                left = left - n;
                result = GO;
                break
            :: else -> at = tail
            fi
        }
    :: LOAD(p, STAMP(at)) < 2 * at ->
        atomic {
            if
            :: tail == at && !closed -> result = WAIT; break
            :: else -> at = tail
            fi
        }
    :: LOAD(p, STAMP(at)) > 2 * at -> at = tail
    od;
    if
    :: result == GO ->
        atomic {
            store(p, STAMP(at), 2 * at + 1);
            if
            :: n > 1 -> store(p, STAMP(at + 1), 2 * at + 3)
            :: else
            fi;
            at = 0;
            n = WAKES(n)
        };
        notify_poppers(p, n)
    :: else -> atomic { at = 0; n = 0 }
    fi
}

inline try_pop(p) {
    at = head;
    do
    :: LOAD(p, STAMP(at)) == 2 * at + 1 ->
        atomic {
            FENCED(p);
            if
            :: head == at ->
                head++;
                left = 0;
                result = GO;
                break
            :: else -> at = head
            fi
        }
    :: LOAD(p, STAMP(at)) < 2 * at + 1 ->
        result = (closed && tail == at -> OVER : WAIT);
        atomic {
            if
            :: head == at -> break
            :: else -> at = head
            fi
        }
    :: LOAD(p, STAMP(at)) > 2 * at + 1 -> at = head
    od;
    if
    :: result == GO ->
        atomic { store(p, STAMP(at), 2 * (at + CAPACITY)); at = 0; n = 1 };
        notify_pushers(p, n)
    :: else -> atomic { at = 0; n = 0 }
    fi
}

inline heavy(p) {
#if defined(NO_HEAVY) || defined(FENCE)
    FENCED(p);
#else
    membarrier(p);
#endif
}

#ifdef NO_TIMEOUT
#define MAY_TIME_OUT false
#else
#define MAY_TIME_OUT true
#endif

/* FUTEX_WAIT */
inline sleep(p, event) {
    d_step { FENCED(p); asleep[p] = event.word == word; word = 0 };
    if
    :: true ->
end_asleep:
        !asleep[p]
    :: MAY_TIME_OUT -> d_step { late = asleep[p]; asleep[p] = false }
    fi;
#ifdef NO_LAST_TRY
    if
    :: true
    :: late = true; result = WAIT
    fi;
#endif
    d_step { FENCED(p); event.waiters-- }
}

#ifdef NO_LAST_TRY
#define TRIES_AGAIN !late
#else
#define TRIES_AGAIN true
#endif

proctype Pusher(byte me) {
    byte word, at, n, result, left = BATCH;
    bool late;
    do
    :: left == 0 || late || result == OVER -> break
    :: else ->
#ifndef LATE_WORD
        word = not_full.word;
#endif
        d_step { FENCED(me); not_full.waiters++ };
        heavy(me);
#ifdef NO_RECHECK
        result = WAIT;
#else
        try_push(me);
#endif
        if
        :: result != WAIT -> atomic { FENCED(me); not_full.waiters--; word = 0 }
        :: else ->
#ifdef LATE_WORD
            word = not_full.word;
#endif
            sleep(me, not_full);
            if
            :: TRIES_AGAIN -> try_push(me)
            :: else
            fi;
#ifndef NO_PASS_ON
            if /* spdl__ring_pass_on */
            :: result == GO && tail - head < CAPACITY -> n = 1; notify_pushers(me, n)
            :: else
            fi
#endif
        fi
    od;
    atomic { result = 0; left = 0; late = false; word = 0 }
}

proctype Popper(byte me) {
    byte word, at, n, result, left = 1;
    bool late;
    do
    :: left == 0 || late || result == OVER -> break
    :: else ->
#ifndef LATE_WORD
        word = not_empty.word;
#endif
        d_step { FENCED(me); not_empty.waiters++ };
        heavy(me);
#ifdef NO_RECHECK
        result = WAIT;
#else
        try_pop(me);
#endif
        if
        :: result != WAIT -> atomic { FENCED(me); not_empty.waiters--; word = 0 }
        :: else ->
#ifdef LATE_WORD
            word = not_empty.word;
#endif
            sleep(me, not_empty);
            if
            :: TRIES_AGAIN -> try_pop(me)
            :: else
            fi;
#ifndef NO_PASS_ON
            if
            :: result == GO && tail > head -> n = 1; notify_poppers(me, n)
            :: else
            fi
#endif
        fi
    od;
    if
    :: result == OVER -> assert(head == tail && closed)
    :: else
    fi;
    atomic { result = 0; left = 0; late = false; word = 0 }
}

/* spdl_ring_close. It stores nothing that waits in a buffer. */
proctype Closer() {
#ifdef CLOSE_WAKES_ONE
#define CLOSE_WAKES 1
#else
#define CLOSE_WAKES 2
#endif
    byte n;
    closed = true;
    if
    :: not_empty.waiters == 0
    :: else -> not_empty.word++; n = CLOSE_WAKES; WAKE_POPPERS(n)
    fi;
    if
    :: not_full.waiters == 0
    :: else -> not_full.word++; n = CLOSE_WAKES; WAKE_PUSHERS(n)
    fi;
    returned = true
}

#define PUSH_ASLEEP (asleep[0] || asleep[PUSHERS - 1])
#define POP_ASLEEP (asleep[PUSHERS] || asleep[PROCS - 1])

init {
    atomic {
        mem[1] = 2 * (CAPACITY - 1); /* the stamp of the second slot, if there is one */
        run Pusher(0);
#if PUSHERS > 1
        run Pusher(1);
#endif
        run Popper(PUSHERS);
#if POPPERS > 1
        run Popper(PUSHERS + 1);
#endif
#ifndef NO_CLOSE
        run Closer()
#endif
    }
    timeout;
    assert(!(POP_ASLEEP && mem[STAMP(head)] == 2 * head + 1));
    assert(!(PUSH_ASLEEP && mem[STAMP(tail)] == 2 * tail));
    assert(!((POP_ASLEEP || PUSH_ASLEEP) && closed))
}
