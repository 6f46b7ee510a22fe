/* The trainer and the sink: spdl__next_wait, spdl__sink_take, the hint for the trainer behind a put
   and behind the finish, and spdl__pipeline_halt of >>stop-impl, >>next-impl, >>wake-impl and
   >>flow-impl.

   Two workers put TICKETS results of an ordered row, each an item or a hole (a dropped item), and
   do a read-modify-write behind each (the next take, or the leave). The trainer takes items in the
   order of their tickets and steps over holes. It waits: `waiting` by an exchange, counted among
   the sleepers, a second look, sleep on `fed`. Who has put something wakes it if its next slot is
   ready, and if it was the one who cleared `waiting`. A hole is ready, too: so a second look that
   has only stepped over holes needs no third one. Behind the last ticket comes a mark, END, which
   the consumer never passes, or nothing for ever; a stop comes at some moment. Each sleep may last
   for ever or end with a timeout, after which the trainer asks again.

   With READY the consumer never sleeps in next. It asks with a timeout of 0, and after a TIMEOUT it
   waits for ready_fn, which adds to `fed`; or it asks again before that. `waiting` is set from the
   TIMEOUT on. Who clears it takes the trainer out of the sleepers, be it a waker or the trainer at
   its next result (spdl__ready_arm, spdl__ready_end).
   It empties its own event before it asks, as the header requires: `word`.

   Checked: when nothing moves any more, the trainer does not sleep while the ticket it waits for is
   there, be it the end, or after a stop; and without a stop it got every item. With READY it is
   counted once while `waiting` is set, and not otherwise.

   Switches that take out one part of the protocol, and must fail:
     PLAIN_WAITING  `waiting` is stored, without a full barrier before the second look
     NO_PUT_FENCE   no full barrier between put and look
     NO_RECHECK     no second look
     LATE_FED       `fed` is read behind it
     OWN_TICKET     who puts looks only whether the trainer waits for that very ticket, not whether
                    its next slot is ready, and does so before the put
     NO_END_HINT    the end is told to nobody
     SILENT_STOP    neither is the stop
     EARLY_STOP     the stop looks for the trainer before it is set
     UNCOUNTED      with READY: the consumer is not among the sleepers
     KEEPS_COUNT    with READY: who wakes it leaves it there
     LATE_WORD      with READY: it empties its event after it has asked
   and one that makes the model smaller:
     NO_STOP        nobody stops */

#ifndef TICKETS
#define TICKETS 3
#endif
#define PROCS 3
#define TRAINER 2
#define STAMP(t) (t) /* 0: not there, else ITEM, HOLE or END */
#define HEAD (TICKETS + 1)
#define WAITING (TICKETS + 2)
#define ADDRESSES (TICKETS + 3)
#define ITEM 1
#define HOLE 2
#define END 3

/* only ever changed by read-modify-writes */
byte claimed, put, items;
bool stopping;
byte fed, sleepers;

bool asleep;
byte taken;

#include "tso.pml"

/* The rest of spdl__wake_waiter, behind the swap. */
inline wake_trainer() {
    if
    :: woke ->
#if defined READY && !defined UNCOUNTED && !defined KEEPS_COUNT
        d_step { assert(sleepers > 0); sleepers-- };
#endif
        d_step { fed++; asleep = false; woke = false }
    :: else
    fi
}

/* behind a full barrier; `anyway`: also without an item */
inline hint(p, anyway) {
    if
    :: sleepers == 0 || LOAD(p, WAITING) == 0
    :: else ->
        at = LOAD(p, HEAD);
        if
        :: anyway || LOAD(p, STAMP(at)) != 0 ->
            d_step { FENCED(p); woke = mem[WAITING] == 1; mem[WAITING] = 0 };
            wake_trainer()
        :: else
        fi;
        at = 0
    fi
}

/* Takes and puts tickets as long as there are any. */
proctype Putter(byte me) {
    byte ticket, at;
    bool finish, woke;
    do
    :: claimed == TICKETS -> break
    :: d_step { claimed < TICKETS && FENCED(me) -> ticket = claimed; claimed++ };
#ifdef OWN_TICKET
        woke = sleepers > 0 && LOAD(me, WAITING) == 1 && LOAD(me, HEAD) == ticket;
#endif
        if
        :: items++; store(me, STAMP(ticket), ITEM)
        :: store(me, STAMP(ticket), HOLE)
        fi;
#ifdef OWN_TICKET
        if
        :: woke -> woke = false; hint(me, true)
        :: else
        fi;
#elif defined NO_PUT_FENCE
        hint(me, false);
#endif
        d_step { FENCED(me); put++; finish = put == TICKETS; ticket = 0 };
#if !defined OWN_TICKET && !defined NO_PUT_FENCE
        hint(me, false)
#endif
    od;
    if
    :: finish -> /* the row finishes, unless the input goes on some day */
        if
        :: true
        :: store(me, STAMP(TICKETS), END);
            FENCED(me);
#ifndef NO_END_HINT
            hint(me, false)
#endif
        fi
    :: else
    fi;
    atomic { FENCED(me); finish = false }
}

/* spdl__sink_take: `moved` tells whether the head went on, over an item or over holes only */
inline sink_take() {
    halted = stopping;
    got = false;
    at = LOAD(TRAINER, HEAD);
    do
    :: LOAD(TRAINER, STAMP(at)) == HOLE -> at++
    :: LOAD(TRAINER, STAMP(at)) == ITEM -> at++; got = true; break
    :: LOAD(TRAINER, STAMP(at)) == END -> ended = true; break
    :: LOAD(TRAINER, STAMP(at)) == 0 -> break
    od;
    moved = at != LOAD(TRAINER, HEAD);
    if
    :: moved -> d_step { FENCED(TRAINER); mem[HEAD] = at } /* its word */
    :: else
    fi;
    d_step {
        at = 0;
        taken = taken + got;
        halted = halted && !got && !ended
    }
}

#ifdef READY
/* if it was counted before */
inline take_out() {
    if
#ifndef UNCOUNTED
    :: was -> d_step { assert(sleepers > 0); sleepers--; was = false }
#endif
    :: else -> was = false
    fi
}

/* spdl__next_ready */
proctype Trainer() {
    byte word, at;
    bool got, moved, ended, halted, was;
next:
    atomic { FENCED(TRAINER); got = false; moved = false };
#ifndef LATE_WORD
    word = fed;
#endif
    sink_take();
    if
    :: !(got || ended || halted) ->
#ifndef UNCOUNTED
        d_step { FENCED(TRAINER); sleepers++ };
#endif
#ifdef PLAIN_WAITING
        was = LOAD(TRAINER, WAITING) == 1;
        store(TRAINER, WAITING, 1);
#else
        d_step { FENCED(TRAINER); was = mem[WAITING] == 1; mem[WAITING] = 1 };
#endif
        take_out();
#ifndef NO_RECHECK
        sink_take();
#endif
    :: else
    fi;
    if
    :: got || ended || halted ->
        d_step { FENCED(TRAINER); was = mem[WAITING] == 1; mem[WAITING] = 0 };
        take_out();
        if
        :: got -> goto next
        :: else -> goto done
        fi
    :: else ->
#ifdef LATE_WORD
        word = fed;
#endif
        d_step { asleep = fed == word; word = 0 };
        if
        :: true ->
end_asleep:
            !asleep
        :: true -> asleep = false /* it asks by itself */
        fi;
        goto next
    fi;
done:
    skip
}
#else
/* spdl__next_wait; the pauses and yields before the first sleep are looks like others, left out */
proctype Trainer() {
    byte word, at;
    bool got, moved, ended, halted;
next: /* a read-modify-write at the door keeps two trainers out */
    atomic { FENCED(TRAINER); got = false; moved = false };
    sink_take();
    if
    :: got -> goto next
    :: ended || halted -> goto done
    :: else
    fi;
    do
    :: true ->
#ifndef LATE_FED
        word = fed;
#endif
        d_step { FENCED(TRAINER); sleepers++; moved = false };
#ifdef PLAIN_WAITING
        store(TRAINER, WAITING, 1);
#else
        d_step { FENCED(TRAINER); mem[WAITING] = 1 };
#endif
#ifndef NO_RECHECK
        sink_take();
#endif
#ifdef LATE_FED
        word = fed;
#endif
        if
        :: got || ended || halted -> word = 0
        :: else ->
            d_step { asleep = fed == word; word = 0 };
            if
            :: true ->
end_asleep:
                !asleep
            :: true -> asleep = false
            fi
        fi;
        d_step { FENCED(TRAINER); mem[WAITING] = 0 };
        d_step { FENCED(TRAINER); sleepers-- };
        if
        :: got -> goto next
        :: ended || halted -> goto done
        :: else
        fi;
        sink_take();
        if
        :: got -> goto next
        :: ended || halted -> goto done
        :: else
        fi
    od;
done:
    skip
}

#endif

/* spdl__pipeline_halt; all it does are read-modify-writes */
inline halt_hint() {
    if
    :: mem[WAITING] == 1 ->
        d_step { woke = mem[WAITING] == 1; mem[WAITING] = 0 };
        wake_trainer()
    :: else
    fi
}

proctype Stopper() {
    bool woke;
#ifdef EARLY_STOP
    halt_hint();
#endif
    stopping = true;
#if !defined SILENT_STOP && !defined EARLY_STOP
    halt_hint()
#endif
}

init {
    atomic {
        run Putter(0);
        run Putter(1);
        run Trainer();
#ifndef NO_STOP
        run Stopper()
#endif
    }
    timeout;
    assert(!(asleep && mem[STAMP(mem[HEAD])] != 0));
    assert(!(asleep && stopping));
    assert(stopping || taken == items)
#if defined READY && !defined UNCOUNTED
    ; assert(sleepers == mem[WAITING])
#endif
}
