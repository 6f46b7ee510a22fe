/* How workers sleep and who wakes them: >>pool-impl and "Who looks again" of >>pipeline-impl.

   WORKERS workers and one outside publisher (the trainer, whose takes make room). Two stages:
     default       stage 0 is a source of ITEMS, stage 1 reads what it puts, the trainer makes room
                   behind stage 1. Both belong to one pipeline.
     -DTWO_CLIENTS one stage in each of two pipelines that share the pool; the trainer makes room
                   behind the one, then behind the other.
   A call may end, or never end. "Never" stands for every call that waits for something which only
   another call would bring about (calls that wait for each other): if such a call waits for ever
   because nobody looks, this model finds the same state with a call that does not end.
     -DMEET        instead, each call of stage 1 waits until two of them are inside, and at the end
                   all of them have been
     -DPARKED      begins with every worker asleep
     -DQUICK       a call of stage 1 may be known as quick: it ends, and the hint of its claim
                   passes over stage 0 (spdl__claim_hint)
     -DFED=n       the trainer takes what stage 1 puts, all of it. While n items lie in front of
                   it a hint may pass over everything (spdl__trainer_is_fed)

   Checked: when nothing moves any more, no stage is runnable while a worker is asleep.

   Left out: stages that end or fail (their last call is followed by a look of the same worker),
   jobs, attach and quit (they ring for all).

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY        a sleeper does a full barrier of its own instead of a heavy one, also when
                     nobody is known to know of sleepers
     STAYS_KNOWN     that they are known is not forgotten when the last of them is awake
     NO_CLEAR        `waking` is not cleared before the second look
     NO_CLEAR_AFTER  nor after the sleep
     LATE_WORD       the bell is read after announcing and clearing
     NO_CLAIM_HINT   no hint between claim and call
     NO_LOOK_FENCE   no full barrier between seeing a sleeper and looking for something runnable
     LATE_FENCE      that barrier is behind the look at `waking`
     OWN_HINT        (with TWO_CLIENTS) the hint of a claim looks at its own pipeline only
     NO_RECHECK      no second look before the sleep
     NO_TAKE_HINT    (with FED) no hint after a take
   and two that take out what the header asks of its users:
     QUICK_HANGS     (with QUICK) a call that is known as quick may never end
     LEAVES          (with FED) the trainer takes one item, and no more */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef ROOMS
#define ROOMS 2 /* takes of the trainer */
#endif
#ifndef CONCURRENCY
#define CONCURRENCY 2 /* of stage 1 */
#endif
#ifndef BUFFER
#define BUFFER 2 /* FED: items that may lie in front of the trainer */
#endif

#define PROCS (WORKERS + 1)
#define TRAINER WORKERS
#define STAGES 2

/* memory */
#define LOCK(n) (n)
#define HEAD(n) (2 + (n)) /* of the edge into stage n; HEAD(2): tickets the trainer has freed */
#define PUT 5             /* default: results of stage 0. TWO_CLIENTS: room behind stage 0 */
#define WAKING 6
#define SINK 7            /* FED: results of stage 1 */
#define ADDRESSES 8

/* only ever changed by read-modify-writes */
byte sleepers;
bool known; /* of the same word as sleepers */
byte bell;
byte active_calls[STAGES];

bool asleep[WORKERS];
byte inside; /* MEET: calls of stage 1 that have begun */

#include "tso.pml"

#ifdef TWO_CLIENTS
#define LIMIT(n) 1
#define ROOM(p, n) ((n) == 0 -> LOAD(p, PUT) : LOAD(p, HEAD(2)))
#define INPUT(p, n) ITEMS
#else
#define LIMIT(n) ((n) == 0 -> 1 : CONCURRENCY)
#define ROOM(p, n) ((n) == 0 -> LOAD(p, HEAD(1)) + 1 : LOAD(p, HEAD(2)))
#define INPUT(p, n) ((n) == 0 -> ITEMS : LOAD(p, PUT))
#endif

/* spdl__node_runnable: one load in each step */
inline runnable(p, n) {
    if
    :: active_calls[n] >= LIMIT(n)
    :: else ->
        if
        :: LOAD(p, LOCK(n)) != 0
        :: else ->
            seen = ROOM(p, n);
            if
            :: d_step { seen <= LOAD(p, HEAD(n)) -> seen = 0 }
            :: d_step { seen > LOAD(p, HEAD(n)) -> seen = LOAD(p, HEAD(n)) };
                d_step { found = INPUT(p, n) > seen; seen = 0 }
            fi
        fi
    fi
}

/* spdl__pipeline_runnable, spdl__pool_runnable */
inline any_runnable(p) {
    runnable(p, 1);
    if
    :: !found -> runnable(p, 0)
    :: else
    fi
}

inline heavy(p) {
#ifdef NO_HEAVY
    FENCED(p);
#else
    membarrier(p);
#endif
}

/* Sleepers differ in nothing but their number, so waking the first stands for waking any. */
inline futex_wake_one() {
    d_step {
        if
        :: asleep[0] -> asleep[0] = false
        :: else ->
            if
            :: asleep[1] -> asleep[1] = false
            :: else ->
#if WORKERS > 2
                asleep[2] = false
#else
                skip
#endif
            fi
        fi
    }
}

/* spdl__trainer_is_fed: the head, then what lies there. In truth it asks for more (how long it has
   lain there, who is awake), so a hint that may pass over everything may look all the same */
inline fed(p) {
#ifdef FED
    seen = LOAD(p, HEAD(2)) - BUFFER;
    if
    :: d_step { LOAD(p, SINK) >= seen + FED -> found = true; seen = 0 }
    :: d_step { true -> seen = 0 }
    fi
#else
    skip
#endif
}

/* What a hint looks at. `own`: the stage whose pipeline hints; `over`: it passes over stage 0 */
inline look(p, own, over) {
    fed(p);
    if
    :: found -> found = false
#ifdef OWN_HINT
    :: else -> runnable(p, own)
#else
    :: !found && (over) -> runnable(p, 1)
    :: !found && !(over) -> any_runnable(p)
#endif
    fi
}

/* spdl__pool_sleepy, the look, spdl__pool_wake_one */
inline hint(p, own, over) {
    if
    :: sleepers == 0
    :: else ->
#if !defined(NO_LOOK_FENCE) && !defined(LATE_FENCE)
        FENCED(p);
#endif
        if
        :: LOAD(p, WAKING) != 0
        :: else ->
#ifdef LATE_FENCE
            FENCED(p);
#endif
            look(p, own, over);
            if
            :: found ->
                d_step { /* the compare-and-swap */
                    FENCED(p);
                    found = mem[WAKING] == 0;
                    mem[WAKING] = 1
                }
                if
                :: found -> d_step { bell++; found = false }; futex_wake_one()
                :: else
                fi
            :: else
            fi
        fi
    fi
}

/* A store without a load between it and the next full barrier of its process, or one while the
   buffer is empty and a read-modify-write follows: the moment it reaches the memory is all that
   matters, so it needs no buffer. */
inline store_now(p, a, v) {
    d_step { FENCED(p); mem[a] = v }
}

/* spdl__node_claim: `taken` tells whether there is a call to run */
inline claim(p, n) {
    if
    :: LOAD(p, LOCK(n)) != 0
    :: else ->
        d_step { FENCED(p); found = mem[LOCK(n)] == 0; mem[LOCK(n)] = 1 }
        if
        :: !found
        :: else ->
            found = false;
            if
            :: active_calls[n] >= LIMIT(n)
            :: else -> /* HEAD(n) is written under this lock only */
                taken = ROOM(p, n) > mem[HEAD(n)];
                if
                :: taken && INPUT(p, n) > mem[HEAD(n)] ->
                    mem[HEAD(n)] = mem[HEAD(n)] + 1;
                    active_calls[n]++
                :: else -> taken = false
                fi
            fi;
            store(p, LOCK(n), 0)
        fi
    fi
}

#ifdef QUICK
#define QUICKLY quick
#else
#define QUICKLY false
#endif
#ifdef QUICK_HANGS
#define HANGS true
#else
#define HANGS !(QUICKLY)
#endif

/* what follows a claim: hint, call, put, spdl__node_leave */
inline perform(p, n) {
#ifdef QUICK
    if
    :: n == 1 -> quick = true
    :: true
    fi;
#endif
#ifndef NO_CLAIM_HINT
    hint(p, n, QUICKLY);
#endif
#ifdef MEET
    if
    :: n == 1 ->
        inside++;
end_in_call:
        inside >= 2
    :: else
    fi;
#else
    if
    :: true -> skip
    :: HANGS ->
end_in_call:
        false
    fi;
#endif
#ifndef TWO_CLIENTS
    if
    :: n == 0 -> store_now(p, PUT, mem[PUT] + 1)
    :: else
#ifdef FED
        -> store_now(p, SINK, mem[SINK] + 1)
#endif
    fi;
#endif
#ifdef QUICK
    quick = false;
#endif
    d_step { FENCED(p); active_calls[n]-- }
}

proctype Worker(byte me) {
    byte word, seen, stage;
    bool found, taken;
#ifdef QUICK
    bool quick;
#endif
#ifdef TWO_CLIENTS
    bool other;
#endif
#ifdef PARKED
    goto end_asleep;
#endif
step: /* spdl__pool_step: downstream first; clients in any order */
#ifdef TWO_CLIENTS
    if
    :: stage = 0
    :: stage = 1
    fi;
#else
    stage = 1;
#endif
    do
    :: true ->
        runnable(me, stage);
        if
        :: found -> found = false; claim(me, stage)
        :: else
        fi;
#ifdef TWO_CLIENTS
        if
        :: taken || other -> other = false; break
        :: else -> other = true; stage = 1 - stage
        fi
#else
        if
        :: taken || stage == 0 -> break
        :: else -> stage = 0
        fi
#endif
    od;
    if
    :: taken -> taken = false; perform(me, stage); goto step
    :: else -> stage = 0
    fi;

    /* spdl__pool_sleep */
#ifndef LATE_WORD
    word = bell;
#endif
    d_step { FENCED(me); sleepers++; found = known };
#ifndef NO_CLEAR
    store_now(me, WAKING, 0);
#endif
#ifdef LATE_WORD
    word = bell;
#endif
    if
    :: found -> d_step { FENCED(me); found = false }
    :: else -> heavy(me); d_step { FENCED(me); known = true }
    fi;
#ifndef NO_RECHECK
    any_runnable(me);
#endif
    if
    :: found -> d_step { found = false; word = 0 }
    :: else ->
        d_step { FENCED(me); asleep[me] = bell == word; word = 0 } /* FUTEX_WAIT */
end_asleep:
        !asleep[me]
    fi;
    d_step {
        FENCED(me);
        sleepers--;
#ifndef STAYS_KNOWN
        known = known && sleepers > 0
#endif
    };
#ifndef NO_CLEAR_AFTER
    store_now(me, WAKING, 0);
#endif
    FENCED(me);
    goto step
}

#ifdef LEAVES
#define TAKES 1
#elif defined(FED)
#define TAKES ITEMS
#else
#define TAKES ROOMS
#endif

/* spdl__sink_take: makes room, then hints */
proctype Trainer() {
    byte seen, takes;
    bool found;
    do
    :: takes == TAKES -> break
    :: else ->
#ifdef FED
end_waits:
        LOAD(TRAINER, SINK) > takes;
#endif
        takes++;
#if defined(TWO_CLIENTS)
        if
        :: takes & 1 -> store(TRAINER, PUT, (takes + 1) / 2); hint(TRAINER, 0, false)
        :: else -> store(TRAINER, HEAD(2), takes / 2); hint(TRAINER, 1, false)
        fi
#elif defined(FED)
        store(TRAINER, HEAD(2), BUFFER + takes);
#ifndef NO_TAKE_HINT
        hint(TRAINER, 1, false)
#endif
#else
        store(TRAINER, HEAD(2), takes);
        hint(TRAINER, 1, false)
#endif
    od
}

#define ASLEEP (asleep[0] + asleep[1] SLEEPER_2)
#if WORKERS > 2
#define SLEEPER_2 + asleep[2]
#else
#define SLEEPER_2
#endif
#define RUNNABLE(n) (mem[LOCK(n)] == 0 && active_calls[n] < LIMIT(n) &&                            \
                     ROOM(0, n) > mem[HEAD(n)] && INPUT(0, n) > mem[HEAD(n)])

init {
    atomic {
#ifdef FED
        mem[HEAD(2)] = BUFFER;
#endif
#ifdef PARKED
        sleepers = WORKERS;
        known = true;
        asleep[0] = true;
        asleep[1] = true;
#if WORKERS > 2
        asleep[2] = true;
#endif
#ifndef TWO_CLIENTS
        mem[HEAD(0)] = 1; /* stage 0 has put one item, and there is no room for another */
        mem[PUT] = 1;
#endif
#endif
        run Worker(0);
        run Worker(1);
#if WORKERS > 2
        run Worker(2);
#endif
        run Trainer()
    }
    timeout;
    assert(mem[LOCK(0)] == 0 && mem[LOCK(1)] == 0);
#ifdef MEET
    assert(inside == ITEMS);
#endif
    assert(!(ASLEEP > 0 && (RUNNABLE(0) || RUNNABLE(1))))
}
