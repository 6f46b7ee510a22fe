/* A stop beside a rewind, without a lock: spdl_pipeline_stop, spdl__pipeline_await,
   spdl__pipeline_drained, spdl__pipeline_halt, spdl__keeper_enter, spdl__keeper_leave,
   spdl__pipeline_go, spdl__rewind_all and spdl__word_open of >>stop-impl, spdl__word_shut of
   >>mark-impl, spdl__word_move of >>flow-impl.

   Two rows, each of them a word {inside, shut}, which one worker enters and leaves as it likes. One
   thread rewinds REWINDS times. STOPS threads stop, once each. Each wait may time out, and a stop
   of timeout 0 does not wait. With -DINSIDE a thread that must not wait stops, too: a call, or a
   worker of the pool in another pipeline. Each swap, each word that is shut or opened, and each
   look is a step. Stores of `keeper` wait in a buffer.

   Checked: nobody frees items, and nothing starts again, while a call is inside or another thread
   frees; at rest all rows are open or all are shut, as `stopping` says; a stop after the last
   rewind has replaced `stopping` stays; after a rewind that no stop overlaps the rows are open;
   every wait that does not time out ends.

   Switches that take out one part of the protocol, and must fail:
     NO_AGAIN     who halts does not look whether `stopping` was cleared meanwhile
     NO_LAST_LOOK the rewind does not look at `stopping` when it has opened all
     CLEARS_STOP  a rewind clears a stop that came meanwhile
     KEEPS_STOP   a rewind does not clear the stops before it
     NO_KEEPER    a stop frees without being the keeper
     NO_LOOK      a stop that became the keeper does not look whether a rewind has come since
     NO_SHUT      nor shuts the rows itself, as another stop may not have done it yet
     SHUT_FIRST   who halts shuts the rows before it sets `stopping`
     SILENT       the keeper leaves without a wake
     EARLY_WAKE   or wakes before it leaves
     LATE_WORD    the word to sleep on is read after the look */

#ifndef REWINDS
#define REWINDS 1
#endif
#ifndef STOPS
#define STOPS 1
#endif
#define PROCS (1 + STOPS)
#define ADDRESSES 1
#define KEEPER 0
#define R 0 /* who rewinds; others stop */

#define STOP 1
#define IN_CALL 2
#define REWIND 4

byte inside[2];
bit shut[2];
byte stopping;
byte quiet; /* the event's word */
bit asleep[PROCS];
/* ghosts */
byte purging;
bit rewinds;  /* a rewind has replaced `stopping`, and opens no row yet */
bit must;     /* a stop that stays */
bit touched;  /* somebody has halted meanwhile */
byte over;    /* threads that have come back */

#include "tso.pml"

inline wake_quiet() {
    d_step {
        quiet++;
        asleep[0] = 0;
        asleep[1] = 0;
#if STOPS > 1
        asleep[2] = 0
#endif
    }
}

/* Sleeps while the event's word is `word`; me: of `asleep`. */
inline sleep_quiet(me, word) {
    atomic { asleep[me] = quiet == word };
    asleep[me] == 0
}

/* spdl__pipeline_halt. A rewind under way clears IN_CALL, and nothing else. */
#define TOUCH touched = touched | (why != REWIND)
#define SET_STOPPING(why)                                                                          \
    d_step {                                                                                       \
        stopping = stopping | why;                                                                 \
        must = must | (why == STOP || (why == IN_CALL && !rewinds));                               \
        TOUCH                                                                                      \
    }
inline halt(why) {
    do
    :: true ->
#ifdef SHUT_FIRST
        d_step { shut[0] = 1; TOUCH };
        d_step { shut[1] = 1; TOUCH };
        SET_STOPPING(why);
#else
        SET_STOPPING(why);
        d_step { shut[0] = 1; TOUCH };
        d_step { shut[1] = 1; TOUCH };
#endif
#ifdef NO_AGAIN
        break
#else
        if
        :: stopping != 0 -> break
        :: else
        fi
#endif
    od;
    skip
}

/* spdl__pipeline_await with spdl__pipeline_drained. got: false when it has timed out */
inline await_quiet(me) {
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
        :: got = false; break
        fi
    od;
    i = 0;
    word = 0
}

/* spdl__pipeline_await with spdl__keeper_enter. got: false when it has timed out */
inline await_keeper(me) {
    got = true;
    do
    :: true ->
#ifndef LATE_WORD
        word = quiet;
#endif
        FENCED(me);
        if
        :: d_step { mem[KEEPER] == 0 -> mem[KEEPER] = me + 1 }; break
        :: else
        fi;
#ifdef LATE_WORD
        word = quiet;
#endif
        if
        :: sleep_quiet(me, word)
        :: got = false; break
        fi
    od;
    word = 0
}

inline keeper_leave(me) {
#ifdef EARLY_WAKE
    wake_quiet();
    store(me, KEEPER, 0)
#else
    store(me, KEEPER, 0);
    FENCED(me);
#ifdef SILENT
    skip
#else
    wake_quiet()
#endif
#endif
}

inline purge() {
    purging++;
    alone_and_quiet();
    d_step { alone_and_quiet(); purging-- }
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
            :: shut[r] == 1 && inside[r] == 0 && stopping != 0 -> wake_quiet()
            :: else
            fi
        :: shut[r] == 1
        fi;
        r = 0
    :: break /* it has enough */
    od
}

proctype Rewinder() {
    byte word, i, n;
    bit stopped;
    bool got;
    do
    :: n == REWINDS -> break
    :: else ->
        n++;
        await_keeper(R);
        if
        :: got ->
            d_step {
                FENCED(R);
#ifdef KEEPS_STOP
                stopping = stopping | REWIND;
#else
                stopping = REWIND;
#endif
                rewinds = 1;
                must = 0;
                touched = 0
            };
            halt(REWIND);
            await_quiet(R);
            if
            :: got ->
                purge();
                /* spdl__rewind_all */
                d_step {
                    rewinds = 0;
#ifdef CLEARS_STOP
                    stopping = 0;
#else
                    stopping = stopping & STOP;
#endif
                    stopped = stopping != 0
                };
                if
                :: stopped
                :: else ->
                    shut[1] = 0; /* the source last */
                    shut[0] = 0;
#ifndef NO_LAST_LOOK
                    if
                    :: stopping != 0 -> shut[0] = 1; shut[1] = 1
                    :: else
                    fi
#endif
                fi;
                assert(touched || (stopping == 0 && shut[0] == 0 && shut[1] == 0))
            :: else -> d_step { stopping = STOP; rewinds = 0; must = 1 }
            fi;
            keeper_leave(R);
            stopped = 0
        :: else
        fi
    od;
    over++
}

proctype Stopper(byte me) {
    byte word, i;
    bool got;
    halt(STOP);
    if
    :: true /* timeout 0: a signal handler, or a thread that does not wait */
    :: true ->
#ifdef NO_KEEPER
        got = true;
#else
        await_keeper(me);
#endif
        if
        :: got ->
            if
#ifdef NO_LOOK
            :: true ->
#else
            :: (stopping & STOP) != 0 ->
#endif
#ifndef NO_SHUT
                shut[0] = 1;
                shut[1] = 1;
#endif
                await_quiet(me);
                if
                :: got -> purge()
                :: else
                fi
#ifndef NO_LOOK
            :: else /* a rewind has come since */
#endif
            fi;
#ifndef NO_KEEPER
            keeper_leave(me)
#endif
        :: else
        fi
    fi;
    over++
}

#ifdef INSIDE
proctype Inside() {
    halt(IN_CALL);
    over++
}
#define THREADS (2 + STOPS)
#else
#define THREADS (1 + STOPS)
#endif

init {
    atomic {
        run Worker();
        run Rewinder();
        run Stopper(1);
#if STOPS > 1
        run Stopper(2);
#endif
#ifdef INSIDE
        run Inside();
#endif
        skip
    };
    timeout;
    assert(over == THREADS); /* all have returned */
    assert(shut[0] == (stopping != 0) && shut[1] == (stopping != 0));
    assert(!must || stopping)
}
