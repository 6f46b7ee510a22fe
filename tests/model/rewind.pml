/* A stop beside a rewind, without a lock: spdl_pipeline_stop, spdl__pipeline_await,
   spdl__pipeline_drained, spdl__rewind_over, spdl__pipeline_halt, spdl__rewind_await_stops,
   spdl__rewind_all and spdl__word_open of >>stop-impl, spdl__word_shut of >>rare-impl,
   spdl__word_move of >>flow-impl.

   Two rows, each of them a word {inside, shut}, which one worker enters and leaves as it likes. One
   thread rewinds REWINDS times. One stops, once: it may time out at any wait, and one of timeout 0
   does not wait. With -DINSIDE a thread that must not wait stops, too: a call, or a worker of the
   pool in another pipeline. It halts without a word in `stops`. Each swap, each word that is shut
   or opened, and each look is a step. Stores of `rewinder` wait in a buffer.

   Checked: nobody frees items, and nothing starts again, while a call is inside or the other one
   frees; at rest all rows are open or all are shut, as `stopping` says; a stop that overlaps or
   follows the last rewind stays; after a rewind that no stop overlaps the rows are open; everybody
   who may not time out comes back.

   Switches that take out one part of the protocol, and must fail:
     NO_AGAIN     who halts does not look whether `stopping` was cleared meanwhile
     NO_LAST_LOOK the rewinder does not look at `stopping` when it has opened all
     NO_STAYS     a stop that has timed out leaves no word
     STAYS_KEPT   the word of an earlier stop is not taken back
     EARLY_LOOK   the rewinder looks at `stops` before it says that it rewinds
     NO_FENCE     or without a full barrier between them
     NO_COUNT     a stop does not count itself
     SHUT_FIRST   who halts shuts the rows before it sets `stopping`
     SILENT_END   the end of a rewind wakes nobody
     SILENT_STOP  nor does the end of a stop
     LATE_WORD    the word to sleep on is read after the look */

#define PROCS 2
#define ADDRESSES 1
#define REWINDER 0
#define R 0 /* who rewinds */
#define S 1 /* who stops */
#ifndef REWINDS
#define REWINDS 1
#endif

byte inside[2];
bit shut[2];
bit stopping, stays;
byte stops, quiet; /* quiet: the event's word */
bit asleep[2];
/* ghosts */
bit claimed; /* the rewinder has seen that nobody stops */
byte claims, round, purging;
byte must;    /* a stop that stays; 2: it began after `rewinder` was set */
bit touched;  /* somebody has halted meanwhile */
byte over;    /* threads that have come back */

#include "tso.pml"

inline wake_quiet() { d_step { quiet++; asleep[0] = 0; asleep[1] = 0 } }

/* Sleeps while the event's word is `word`; me: of `asleep`. */
inline sleep_quiet(me, word) {
    atomic { asleep[me] = quiet == word };
    asleep[me] == 0
}


#define TOUCH touched = touched | others
inline halt(others) {
    do
    :: true ->
#ifdef SHUT_FIRST
        d_step { shut[0] = 1; TOUCH };
        d_step { shut[1] = 1; TOUCH };
        d_step { stopping = 1; TOUCH };
#else
        d_step { stopping = 1; TOUCH };
        d_step { shut[0] = 1; TOUCH };
        d_step { shut[1] = 1; TOUCH };
#endif
#ifdef NO_AGAIN
        break
#else
        if
        :: stopping == 1 -> break
        :: else
        fi
#endif
    od;
    skip
}

/* spdl__pipeline_await with spdl__pipeline_drained. got: false when it has timed out */
inline await_quiet(me, times_out) {
    got = true;
    do
    :: true ->
#ifndef LATE_WORD
        word = quiet;
#endif
        i = 0;
        do
        :: i < 2 && inside[i] == 0 -> i++
        :: else -> break
        od;
        if
        :: i == 2 -> break
        :: else
        fi;
#ifdef LATE_WORD
        word = quiet;
#endif
        if
        :: sleep_quiet(me, word)
        :: times_out -> got = false; break
        fi
    od;
    i = 0;
    word = 0
}

inline alone_and_quiet() { assert(inside[0] == 0 && inside[1] == 0 && purging == 1) }

proctype Worker() {
    bit r;
end_idle:
    do
    :: stopping == 0 ->
        if
        :: r = 0
        :: r = 1
        fi;
end_shut:
        /* the swap, which fails where the row is shut */
        if
        :: atomic { shut[r] == 0 -> inside[r]++ };
            assert(purging == 0);
            /* spdl__word_move */
            d_step { inside[r]-- };
            if
            :: shut[r] == 1 && inside[r] == 0 && stopping == 1 -> wake_quiet()
            :: else
            fi
        :: shut[r] == 1
        fi;
        r = 0
    :: break /* it has enough */
    od
}

proctype Rewinder() {
    byte word, i, n, seen;
    bool got;
    do
    :: n == REWINDS -> break
    :: else ->
        n++;
        /* spdl__rewind_await_stops */
        do
        :: true ->
            d_step { must = 0; touched = 0; round++ };
#ifndef STAYS_KEPT
            stays = 0;
#endif
#ifdef EARLY_LOOK
            seen = stops;
            store(R, REWINDER, 1);
            FENCED(R);
            d_step { claimed = seen == 0; claims = claims + claimed };
#else
            store(R, REWINDER, 1);
#ifndef NO_FENCE
            FENCED(R);
#endif
            d_step { seen = stops; claimed = seen == 0; claims = claims + claimed };
#endif
            if
            :: claimed -> d_step { must = (must == 2 -> 2 : 0); seen = 0 }; break
            :: else
            fi;
            store(R, REWINDER, 0);
            FENCED(R);
            wake_quiet();
            word = quiet;
            if
            :: stops != 0 -> sleep_quiet(0, word)
            :: else
            fi;
            d_step { word = 0; seen = 0 }
        od;
        halt(0);
        await_quiet(0, false);
        /* spdl__rewind_all */
        purging++;
        alone_and_quiet();
        alone_and_quiet();
        d_step { alone_and_quiet(); purging-- };
        if
        :: stays == 1
        :: else ->
            stopping = 0;
            shut[1] = 0; /* the source last */
            shut[0] = 0;
            d_step { got = stays == 1; stays = 0 };
            if
            :: got -> stopping = 1
            :: else
            fi;
#ifndef NO_LAST_LOOK
            if
            :: stopping == 1 -> shut[0] = 1; shut[1] = 1
            :: else
            fi
#endif
        fi;
        atomic {
            assert(touched || (stopping == 0 && shut[0] == 0 && shut[1] == 0));
            claimed = 0
        };
        store(R, REWINDER, 0);
        FENCED(R);
#ifndef SILENT_END
        wake_quiet()
#endif
    od;
    over++
}

proctype Stopper() {
    byte word, i;
    byte began;
    bool got, waits;
    if
    :: waits = true
    :: true /* timeout 0: a signal handler, or a thread that does not wait */
    fi;
    d_step {
        FENCED(S);
        began = (mem[REWINDER] == 1 -> round : 255);
#ifndef NO_COUNT
        stops++
#endif
    };
    /* spdl__pipeline_await with spdl__rewind_over */
    do
    :: true ->
        word = quiet;
        if
        :: LOAD(S, REWINDER) == 0 -> got = true; break
        :: else
        fi;
        if
        :: !waits -> got = false; break
        :: waits -> got = false; break /* it times out */
        :: waits -> sleep_quiet(1, word)
        fi
    od;
    word = 0;
#ifndef NO_STAYS
    if
    :: !got -> d_step { stays = 1; touched = 1 }
    :: else
    fi;
#endif
    halt(1);
    if
    :: waits && got ->
        await_quiet(1, true);
        if
        :: got ->
            purging++;
            alone_and_quiet();
            d_step { alone_and_quiet(); purging-- }
        :: else
        fi
    :: else
    fi;
    d_step { stops = (stops > 0 -> stops - 1 : 0); must = (began == round -> 2 : 1) };
#ifndef SILENT_STOP
    wake_quiet();
#endif
    over++
}

#ifdef INSIDE
proctype Inside() {
    byte before;
    bit was;
    d_step { before = claims; was = claimed };
    halt(1);
    d_step { must = (must == 0 && !was && claims == before -> 1 : must) };
    over++
}
#define THREADS 3
#else
#define THREADS 2
#endif

init {
    atomic {
        run Worker();
        run Rewinder();
        run Stopper()
#ifdef INSIDE
        ;
        run Inside()
#endif
    };
    timeout;
    assert(over == THREADS); /* all have returned */
    assert(shut[0] == stopping && shut[1] == stopping);
    assert(!must || stopping)
}
