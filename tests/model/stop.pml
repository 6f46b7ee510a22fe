/* Stopping: spdl_pipeline_stop with spdl__pipeline_await_quiet and spdl__pipeline_purge, against
   the takes, held takes and leaves of spdl__step_sit, and spdl_complete, of >>claim-impl and
   >>stop-impl.

   One row with concurrency 2, an edge with ITEMS items before it and one behind it; two workers; a
   call may be deferred, then a thread of its own completes it at any moment, or never. Two threads
   stop at any moment: each sets STOPPED in the word, waits until it says that nobody is active, and
   purges: frees what lies on the edges, one of them at a time. The second one may give up waiting.
   Any take may be a held one, which passes a hole and gives its place back, or keeps it and calls.
   A producer with drop_oldest passes one item HELD, without a place.

   Checked: once a stop has returned nobody is inside, holds the row, or begins a call; when nothing
   moves any more, no stop sleeps although the row is quiet; and each item was freed or handed out
   once, or is still inside a call that has not ended.

   Switches that take out one part of the protocol, and must fail:
     PLAIN_STOPPED    STOPPED is a store to a word of its own, not part of the word of the row
     STORE_RELEASE    a release stores the word it has worked out
     SILENT_RELEASE   a release that gives the place back does not look for a stop
     SILENT_DROP      neither does that of a producer, which has no place
     IGNORE_HELD      a stop waits for nobody active, not for HELD
     EARLY_LOOK       who leaves looks at STOPPED before it has left
     LATE_WORD        `quiet` is read behind the look at the word
     SILENT_COMPLETE  a completion from another thread does not look for a stop
     EARLY_LEAVE      a completion leaves before it puts
     NO_PURGE_LOCK    two purges at once
   and some that make the model smaller:
     NO_DEFER, NO_DROP, ONE_STOP */

#ifndef ITEMS
#define ITEMS 2
#endif
#define PROCS 4
#define COMPLETER 2
#define PRODUCER 3
#define STAMP(t) (t)           /* before the row */
#define OUT(t) (ITEMS + (t))   /* behind it */
#define ADDRESSES (2 * ITEMS)

/* only ever changed by read-modify-writes */
byte word;
byte quiet;
bit stopping, purge_lock;

#define HELD 4
#define STOPPED 8
#define HD(w) ((w) / 16)
#define AC(w) ((w) & 3)
#ifdef PLAIN_STOPPED
#define FLAGS(w) (((w) & 12) | (stopping -> STOPPED : 0))
#define HAS_STOPPED(w) stopping
#else
#define FLAGS(w) ((w) & 12)
#define HAS_STOPPED(w) ((w) & STOPPED)
#endif
#ifdef IGNORE_HELD
#define QUIET(w) (AC(w) == 0)
#else
#define QUIET(w) (((w) & (HELD + 3)) == 0)
#endif

bool asleep[2];
bool returned;
byte deferred[2]; /* 1 more than the ticket of a call that waits to be completed */
byte owned[ITEMS]; /* inside a call */
byte freed[ITEMS];

#include "tso.pml"

inline leave(p) {
#ifdef EARLY_LOOK
    old = word;
    d_step { FENCED(p); word = word - 1; old = old - 1 };
#else
    d_step { FENCED(p); word = word - 1; old = word };
#endif
    tell_quiet()
}

/* `old` is the word a read-modify-write has left behind */
inline tell_quiet() {
    if
    :: HAS_STOPPED(old) && QUIET(old) ->
        old = 0;
        quiet++;
        d_step { asleep[0] = false; asleep[1] = false }
    :: else -> old = 0
    fi
}

/* more: to the head, less: of places */
inline release(p, w, more, less) {
#ifdef STORE_RELEASE
    d_step { FENCED(p); word = (w) + 16 * (more) - (less); old = word }
#else
    d_step { FENCED(p); word = word + 16 * (more) - HELD - (less); old = word }
#endif
}

inline put(p, t) {
    store(p, OUT(t), 1);
    owned[t] = 0
}

proctype Worker(byte me) {
    byte w, h, old;
    bool mine, taken;
take:
    w = word;
    if
    :: HD(w) == ITEMS || LOAD(me, STAMP(HD(w))) == 0 -> goto out
    :: FLAGS(w) != 0 || (!mine && AC(w) == 2) -> goto out
    :: else
    fi;
    h = HD(w);
    if
    :: true ->
        d_step {
            FENCED(me);
            taken = word == w;
            if
            :: taken -> word = w + 16 + (mine -> 0 : 1); owned[h] = 1; assert(!returned)
            :: else
            fi;
            w = 0
        }
    :: true -> /* a held take, of a hole or of an item */
        d_step {
            FENCED(me);
            taken = word == w;
            w = w + (mine -> 0 : 1);
            if
            :: taken -> word = w + HELD; mine = true; assert(!returned)
            :: else -> w = 0
            fi
        };
        if
        :: taken ->
            if
            :: true -> /* the item was dropped before */
                assert(!returned); /* the fields of the row */
                d_step { freed[h]++; assert(freed[h] == 1) /* settled once */ };
                taken = false;
                release(me, w, 1, 1);
                mine = false;
                w = 0;
#ifndef SILENT_RELEASE
                tell_quiet();
#else
                old = 0;
#endif
                h = 0;
                goto take
            :: true ->
                owned[h] = 1;
                release(me, w, 1, 0);
                d_step { w = 0; old = 0 }
            fi
        :: else
        fi
    fi;
    if
    :: !taken -> h = 0; goto out
    :: else -> d_step { taken = false; mine = true }
    fi;
    assert(!returned); /* the call */
    if
    :: true
#ifndef NO_DEFER
    :: deferred[me] == 0 -> /* the place is the completion's */
        d_step { deferred[me] = h + 1; h = 0; mine = false };
        goto take
#endif
    fi;
    put(me, h);
    h = 0;
    goto take;
out:
    w = 0;
    h = 0;
    if
    :: mine -> mine = false; leave(me); goto take
    :: else -> skip
    fi;
    if /* looks again, or goes elsewhere */
    :: HD(word) < ITEMS && FLAGS(word) == 0 && AC(word) < 2 -> goto take
    :: true
    fi
}

proctype Completer() {
    byte t, old, i;
end_idle:
    do
    :: deferred[0] > 0 -> d_step { t = deferred[0] - 1; deferred[0] = 0 }; goto settle
    :: deferred[1] > 0 -> d_step { t = deferred[1] - 1; deferred[1] = 0 }; goto settle
    od;
settle:
    assert(!returned); /* returned although a call waits */
#ifdef EARLY_LEAVE
    leave(COMPLETER);
    put(COMPLETER, t);
#else
    put(COMPLETER, t);
#ifdef SILENT_COMPLETE
    d_step { FENCED(COMPLETER); word = word - 1 };
#else
    leave(COMPLETER);
#endif
#endif
    t = 0;
    goto end_idle
}

/* drop_oldest */
proctype Producer() {
    byte w, h, old;
    bool taken;
    w = word;
    if
    :: FLAGS(w) == 0 && HD(w) < ITEMS ->
        h = HD(w);
        d_step {
            FENCED(PRODUCER);
            taken = word == w;
            if
            :: taken -> word = w + HELD
            :: else
            fi
        };
        if
        :: taken ->
            assert(!returned); /* the fields of the row */
            d_step { freed[h]++; assert(freed[h] == 1) /* settled once */ };
            release(PRODUCER, w, 1, 0);
#ifndef SILENT_DROP
            tell_quiet()
#endif
        :: else
        fi
    :: else
    fi;
    d_step { w = 0; h = 0; taken = false; old = 0 }
}

inline purge() {
    i = 0;
#ifdef NO_PURGE_LOCK
    held = true;
#else
    d_step { held = purge_lock == 0; purge_lock = 1 };
#endif
    if
    :: held ->
        i = HD(word);
        do
        :: i == ITEMS -> break
        :: else ->
            if
            :: mem[STAMP(i)] == 1 ->
                mem[STAMP(i)] = 2;
                d_step { freed[i]++; assert(freed[i] == 1) /* settled once */ }
            :: else
            fi;
            i++
        od;
        i = 0;
        do
        :: i == ITEMS -> break
        :: else ->
            if
            :: mem[OUT(i)] == 1 ->
                mem[OUT(i)] = 2;
                d_step { freed[i]++; assert(freed[i] == 1) /* settled once */ }
            :: else
            fi;
            i++
        od;
        i = 0;
        d_step { held = false; purge_lock = 0 }
    :: else
    fi
}

/* A stop may come at any moment; the second one may give up. */
proctype Stopper(byte me) {
    byte q, i;
    bool held, slept;
    stopping = 1;
#ifndef PLAIN_STOPPED
    word = word | STOPPED;
#endif
    do
    :: true ->
#ifndef LATE_WORD
        q = quiet;
#endif
        if
        :: QUIET(word) -> q = 0; returned = true; break
        :: else ->
            if
            :: slept -> q = 0; goto over
            :: else
            fi;
#ifdef LATE_WORD
            q = quiet;
#endif
            d_step { asleep[me] = quiet == q; q = 0 };
            if
            :: true ->
end_asleep:
                !asleep[me]
            :: me == 1 -> d_step { slept = asleep[1]; asleep[1] = false }
            fi
        fi
    od;
    purge();
over:
    skip
}

init {
    byte i;
    atomic {
        do
        :: i == ITEMS -> break
        :: else -> mem[STAMP(i)] = 1; i++
        od;
        i = 0;
        run Worker(0);
        run Worker(1);
#ifndef NO_DEFER
        run Completer();
#endif
#ifndef NO_DROP
        run Producer();
#endif
#ifndef ONE_STOP
        run Stopper(1);
#endif
        run Stopper(0)
    }
    timeout;
    assert(!((asleep[0] || asleep[1]) && QUIET(word)));
    do
    :: i == ITEMS -> break
    :: else ->
        assert(!returned || freed[i] == 1); /* settled: neither lost nor twice */
        assert(freed[i] + owned[i] <= 1); /* settled */
        i++
    od
}
