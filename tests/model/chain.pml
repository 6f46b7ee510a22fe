/* Chains: "--- chains ---" of >>flow-impl, with spdl__node_stays_away, spdl__pool_sleep and
   spdl__pool_hint of >>pool-impl.

   Two workers and three rows, each with a concurrency of 1: a source of ITEMS items, a brief row
   behind it, and a last one that takes what comes and is not brief. So source and second row are
   chained when the second has nothing waiting and is not at work, and the source stays away from a
   second row that is at work. Edge 0 has room for 2, edge 1 for ROOM. A group is of GROUP items at
   most; a chain may claim again. A call may never end, as in park.pml.

   Checked: when nothing moves any more, no row is runnable while a worker is asleep; the last row
   has taken all items, unless a call has not ended; and it has taken them in their order.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY        a sleeper does a full barrier of its own instead of a heavy one
     NO_RECHECK      no second look before the sleep
     NO_CLAIM_HINT   no hint between claim and calls
     NO_PUT_HINT     no hint after an item, while others of the group are to come
     NO_AGAIN_HINT   no hint when a chain claims again: the last item of the group before lies there
     NO_CUT          a chain without room behind it goes on
     BLIND           (GROUP=1, ROOM=1) a chain is begun though something lies on the edge between
     BUSY            (GROUP=1, ITEMS=4) or though a call of the second row is under way
     LEFT_CHAINED    the second row is unlocked, but still says that it is chained
     NO_TAKEN        items that pass an edge do not count as taken there */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef ROOM
#define ROOM 2
#endif
#ifndef GROUP
#define GROUP 2
#endif
#define STORES_WAIT
#define DEPTH 3
#define PROCS 2

/* memory */
#define LOCK(n) (n)
#define RESERVED(e) (3 + (e))
#define TAKEN(e) (5 + (e))
#define TAIL(e) (7 + (e))
#define HEAD 9 /* of edge 0; that of edge 1 is TAKEN(1), as nothing passes it */
#define CHAINED 10
#define WAKING 11
#define ADDRESSES 12

/* only ever changed by read-modify-writes */
byte sleepers, bell, at_work[3];

bool asleep[2];
byte made;          /* by the source; written by the one call of it */
byte taken;         /* by the last row */
byte stuck;         /* calls that never end */
byte item[2 * 4];   /* what lies on an edge; published by TAIL */

#include "tso.pml"

#define ROOM_ON(p, e, room) (LOAD(p, RESERVED(e)) - LOAD(p, TAKEN(e)) < (room))

/* spdl__node_runnable, in the order of its loads */
inline runnable(p, n) {
    if
    :: at_work[n] != 0
    :: else ->
        if
        :: LOAD(p, LOCK(n)) != 0
        :: else ->
            if
            :: n == 0 ->
                if
                :: made == ITEMS || !ROOM_ON(p, 0, 2)
                :: else ->
#ifdef FREELY
                    found = true
#else
                    if
                    :: LOAD(p, CHAINED) != 0
                    :: else -> found = at_work[1] == 0
                    fi
#endif
                fi
            :: n == 1 ->
                if
                :: !ROOM_ON(p, 1, ROOM)
                :: else -> found = LOAD(p, TAIL(0)) != LOAD(p, HEAD)
                fi
            :: n == 2 -> found = LOAD(p, TAIL(1)) != LOAD(p, TAKEN(1))
            fi
        fi
    fi
}

inline any_runnable(p) {
    runnable(p, 2);
    if
    :: !found -> runnable(p, 1)
    :: else
    fi;
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

/* spdl__pool_hint; there are two workers, so the one who sleeps is the other */
inline hint(p) {
    if
    :: sleepers == 0
    :: else ->
        if
        :: LOAD(p, WAKING) != 0
        :: else ->
            FENCED(p);
            any_runnable(p);
            if
            :: found ->
                d_step { FENCED(p); found = mem[WAKING] == 0; mem[WAKING] = 1 };
                if
                :: found -> d_step { bell++; found = false; asleep[1 - (p)] = false }
                :: else
                fi
            :: else
            fi
        fi
    fi
}

inline claim_hint(p) {
#ifndef NO_CLAIM_HINT
    hint(p)
#else
    skip
#endif
}

inline put_hint(p) {
#ifndef NO_PUT_HINT
    hint(p)
#else
    skip
#endif
}

inline again_hint(p) {
#ifndef NO_AGAIN_HINT
    hint(p)
#else
    skip
#endif
}

inline try_lock(p, n) {
    d_step { FENCED(p); found = mem[LOCK(n)] == 0; mem[LOCK(n)] = 1 }
}

inline call() {
    if
    :: true -> skip
    :: true ->
        stuck++;
end_in_call:
        false
    fi
}

/* What one process alone writes, at any time */
inline grow(p, a, by) {
    at = LOAD(p, a) + by;
    store(p, a, at);
    at = 0
}

inline put(p, e, what) {
    assert(taken + ROOM > LOAD(p, TAIL(1)) || e == 0);
    item[(e) * 4 + LOAD(p, TAIL(e))] = what;
    grow(p, TAIL(e), 1)
}

/* spdl__chain_follows */
#ifdef BLIND
#define NOTHING_BETWEEN(p) true
#else
#define NOTHING_BETWEEN(p) (LOAD(p, TAIL(0)) == LOAD(p, HEAD))
#endif
#ifdef BUSY
#define FREE true
#else
#define FREE (at_work[1] == 0)
#endif
#define FOLLOWS(p) (NOTHING_BETWEEN(p) && FREE && ROOM_ON(p, 1, ROOM))

inline chain_cut(p) {
    chain = false;
#ifndef LEFT_CHAINED
    store(p, CHAINED, 0);
#endif
    store(p, LOCK(1), 0)
}

/* spdl__source_claim */
inline source_claim(p) {
    d_step {
        if
        :: LOAD(p, RESERVED(0)) - LOAD(p, TAKEN(0)) >= 2 -> left = 0
        :: else -> left = 2 - (LOAD(p, RESERVED(0)) - LOAD(p, TAKEN(0)))
        fi;
        if
        :: left > GROUP -> left = GROUP
        :: else
        fi;
        if /* the rest of a group behind the end is given back: as if it were not claimed */
        :: left > ITEMS - made -> left = ITEMS - made
        :: else
        fi
    }
    if
    :: left > 0 -> grow(p, RESERVED(0), left)
    :: else
    fi
}

/* spdl__chain_open */
inline chain_open(p) {
    if
    :: FOLLOWS(p) ->
        try_lock(p, 1);
        if
        :: found ->
            found = false;
            if
            :: FOLLOWS(p) -> chain = true; store(p, CHAINED, 1)
            :: else -> store(p, LOCK(1), 0)
            fi
        :: else
        fi
    :: else
    fi
}

/* spdl__edge_pass */
inline pass(p) {
#ifndef NO_TAKEN
    if
    :: passed > 0 -> grow(p, TAKEN(0), passed)
    :: else
    fi;
#endif
    passed = 0
}

/* spdl__chain_fit and spdl__chain_item; without a chain as in spdl__source_run */
inline source_item(p) {
#ifndef NO_CUT
    if
    :: chain && !ROOM_ON(p, 1, ROOM) -> pass(p); chain_cut(p); cut = true
    :: else
    fi;
#endif
    call();
    made++;
    left--;
    if
    :: chain ->
        call();
        passed++;
        grow(p, RESERVED(1), 1);
        put(p, 1, made - 1)
    :: else -> put(p, 0, made - 1)
    fi
}

/* The first row: claim, chain, calls, spdl__chain_close */
inline source_step(p) {
    try_lock(p, 0);
    if
    :: found ->
        found = false;
        if
        :: at_work[0] == 0 -> source_claim(p)
        :: else
        fi;
        if
        :: left > 0 -> d_step { FENCED(p); at_work[0]++; done = true }
        :: else
        fi;
        store(p, LOCK(0), 0);
        if
        :: left > 0 ->
            chain_open(p);
            claim_hint(p);
            do
            :: left > 0 ->
                source_item(p);
                if
                :: left > 0 -> put_hint(p)
                :: else ->
                    pass(p);
                    if
                    :: chain && !cut ->
                        source_claim(p);
                        if
                        :: left > 0 -> again_hint(p)
                        :: else
                        fi
                    :: true /* it has taken its time, or has no chain */
                    fi
                fi
            :: else -> break
            od;
            if
            :: chain -> chain_cut(p)
            :: else
            fi;
            cut = false;
            d_step { FENCED(p); at_work[0]-- }
        :: else
        fi
    :: else
    fi
}

inline second_step(p) {
    try_lock(p, 1);
    if
    :: found ->
        found = false;
        if
        :: at_work[1] == 0 && ROOM_ON(p, 1, ROOM) && LOAD(p, TAIL(0)) != LOAD(p, HEAD) ->
            what = item[LOAD(p, HEAD)];
            grow(p, RESERVED(1), 1);
            grow(p, TAKEN(0), 1);
            grow(p, HEAD, 1);
            d_step { FENCED(p); at_work[1]++; done = true }
        :: else
        fi;
        store(p, LOCK(1), 0);
        if
        :: done ->
            claim_hint(p);
            call();
            put(p, 1, what);
            what = 0;
            d_step { FENCED(p); at_work[1]-- }
        :: else
        fi
    :: else
    fi
}

inline last_step(p) {
    try_lock(p, 2);
    if
    :: found ->
        found = false;
        if
        :: at_work[2] == 0 && LOAD(p, TAIL(1)) != LOAD(p, TAKEN(1)) ->
            assert(taken == item[4 + LOAD(p, TAKEN(1))]); /* in order */
            taken++;
            grow(p, TAKEN(1), 1);
            d_step { FENCED(p); at_work[2]++; done = true }
        :: else
        fi;
        store(p, LOCK(2), 0);
        if
        :: done ->
            claim_hint(p);
            call();
            d_step { FENCED(p); at_work[2]-- }
        :: else
        fi
    :: else
    fi
}

proctype Worker(byte me) {
    byte word, at, left, what, passed;
    bool found, done, chain, cut;
step: /* downstream first */
    runnable(me, 2);
    if
    :: found -> found = false; last_step(me)
    :: else
    fi;
    if
    :: !done ->
        runnable(me, 1);
        if
        :: found -> found = false; second_step(me)
        :: else
        fi
    :: else
    fi;
    if
    :: !done ->
        runnable(me, 0);
        if
        :: found -> found = false; source_step(me)
        :: else
        fi
    :: else
    fi;
    if
    :: done -> done = false; goto step
    :: else
    fi;

    /* spdl__pool_sleep */
    word = bell;
    d_step { FENCED(me); sleepers++ };
    store(me, WAKING, 0);
    heavy(me);
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
    d_step { FENCED(me); sleepers-- };
    store(me, WAKING, 0);
    heavy(me);
    goto step
}

#define LOCKED(n) (mem[LOCK(n)] != 0 || at_work[n] != 0)
#ifdef FREELY
#define AWAY false
#else
#define AWAY (mem[CHAINED] != 0 || at_work[1] != 0)
#endif
#define SOURCE_RUNS (!LOCKED(0) && made < ITEMS && ROOM_ON(0, 0, 2) && !AWAY)
#define SECOND_RUNS (!LOCKED(1) && ROOM_ON(0, 1, ROOM) && mem[TAIL(0)] != mem[HEAD])
#define LAST_RUNS (!LOCKED(2) && mem[TAIL(1)] != mem[TAKEN(1)])

init {
    atomic {
        run Worker(0);
        run Worker(1)
    }
    timeout;
    assert(!((asleep[0] || asleep[1]) && (SOURCE_RUNS || SECOND_RUNS || LAST_RUNS)));
    assert(stuck > 0 || taken == ITEMS)
}
