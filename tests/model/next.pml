/* The trainer and the sink: spdl__next_wait, spdl__sink_take, spdl__node_put, spdl__node_finish and
   spdl__pipeline_halt of >>pipeline-impl.

   Two workers put TICKETS results of an ordered stage, each an item or a hole (a dropped item). The
   trainer takes items in the order of their tickets and steps over holes; a worker wakes it only
   for the ticket it has come to. The input may end or never end; a stop comes at some moment. Each
   sleep may last for ever or end with a timeout, after which the trainer asks again.

   Checked: when nothing moves any more, the trainer does not sleep while the ticket it waits for is
   there, while there is an end to be told, or after a stop; and without a stop it got every item.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY    the trainer does a full barrier of its own instead of a heavy one
     NO_RECHECK  no second look after prepare
     NO_RELOOK   no further look when the second one has only stepped over holes
   and one that makes the model smaller:
     NO_STOP     nobody stops */

#ifndef TICKETS
#define TICKETS 3
#endif
#define PROCS 3
#define TRAINER 2
#define STAMP(t) (t) /* 0: not there, else ITEM or HOLE */
#define HEAD (TICKETS + 1)
#define END (TICKETS + 2)
#define ADDRESSES (TICKETS + 3)
#define ITEM 1
#define HOLE 2

/* only ever changed by read-modify-writes */
byte claimed, put, items;
bool stopping;
byte word_now, waiters;

bool asleep;
byte taken;

#include "tso.pml"

/* Takes and puts tickets as long as there are any. */
proctype Putter(byte me) {
    byte ticket;
    bool finish;
    do
    :: claimed == TICKETS -> break
    :: d_step { claimed < TICKETS && FENCED(me) -> ticket = claimed; claimed++ };
        if
        :: items++; store(me, STAMP(ticket), ITEM)
        :: store(me, STAMP(ticket), HOLE)
        fi;
        if
        :: waiters == 0
        :: else ->
            if
            :: LOAD(me, HEAD) != ticket
            :: else ->
                d_step { FENCED(me); word_now++ };
                asleep = false
            fi
        fi;
        d_step { FENCED(me); put++; finish = put == TICKETS; ticket = 0 }
    od;
    if
    :: finish -> /* spdl__node_finish, unless the input goes on some day */
        if
        :: true
        :: store(me, END, 1);
            if
            :: waiters == 0
            :: else -> d_step { FENCED(me); word_now++ }; asleep = false
            fi
        fi
    :: else
    fi;
    atomic { FENCED(me); finish = false }
}

/* spdl__sink_take: `moved` tells whether the head went on, over an item or over holes only */
inline sink_take() {
    halted = stopping;
    ended = LOAD(TRAINER, END) != 0;
    got = false;
    at = LOAD(TRAINER, HEAD);
    do
    :: LOAD(TRAINER, STAMP(at)) == HOLE -> at++
    :: LOAD(TRAINER, STAMP(at)) == ITEM -> at++; got = true; break
    :: LOAD(TRAINER, STAMP(at)) == 0 -> break
    od;
    atomic { moved = at != LOAD(TRAINER, HEAD); ended = ended && at == TICKETS && !got };
    if
    :: moved -> store(TRAINER, HEAD, at)
    :: else
    fi;
    d_step {
        at = 0;
        taken = taken + got;
        halted = halted && !got && !ended
    }
}

#ifdef NO_RELOOK
#define LOOK_ON false
#else
#define LOOK_ON moved
#endif

/* spdl__next_wait; the spins before the first sleep are looks like others and left out */
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
        word = word_now;
        d_step { FENCED(TRAINER); waiters++; moved = false };
#ifdef NO_HEAVY
        FENCED(TRAINER);
#else
        membarrier(TRAINER);
#endif
#ifndef NO_RECHECK
        sink_take();
#endif
        if
        :: got || ended || halted || LOOK_ON ->
            d_step { FENCED(TRAINER); waiters--; word = 0 };
            if
            :: got -> goto next
            :: ended || halted -> goto done
            :: else -> skip
            fi
        :: else ->
            d_step { FENCED(TRAINER); asleep = word_now == word; word = 0 };
            if
            :: true ->
end_asleep:
                !asleep
            :: true -> asleep = false
            fi;
            d_step { FENCED(TRAINER); waiters-- };
            sink_take();
            if
            :: got -> goto next
            :: ended || halted -> goto done
            :: else
            fi
        fi
    od;
done:
    skip
}

/* spdl__pipeline_halt */
proctype Stopper() {
    stopping = true;
    if
    :: waiters == 0
    :: else -> word_now++; asleep = false
    fi
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
    assert(!(asleep && (stopping || (mem[END] != 0 && mem[HEAD] == TICKETS))));
    assert(stopping || taken == items)
}
