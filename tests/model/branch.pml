/* A branch and its merge: spdl__put_turn, spdl__put_path and spdl__put_mark of >>mark-impl,
   spdl__fail of >>fail-impl, spdl__merge_pick, spdl__merge_mark and spdl__merge_sit of
   >>merge-impl.

   Row B, a branch, takes ITEMS items, the second of which may be the end of an epoch, and then
   END, or FAIL of the row above. It routes each item down one of two paths, drops it (a hole in
   path 0), or fails (FAIL down both); for each of these it first writes into the ring of turns.
   In path 0 is row A, of two calls in input order, in path 1 row C, of one call. Their calls
   pass the item, drop it (a hole), or fail. The merge M takes what lies at the head of the path
   whose turn it is. The branch is called while fewer than WAITS results wait beyond what the
   paths hold, one each. The consumer takes when it likes. Two workers do any step that can be
   done. Memory is sequentially consistent; who sleeps is in sit.pml.

   With -DCOMPLETION the merge has no turns: it looks at each path, one after the other, and takes
   from one with an item; when none had one it looks at each again, for marks.

   Checked: what the consumer gets is what was not dropped, in order, up to the first failure in
   that order, and the failure is that; END comes when all was taken; the end of an epoch in its
   place, and no call of the next one begins in row A while one of this one is inside; nothing is
   put without a slot; and there is no rest before END or a failure has come. With COMPLETION the
   order within an epoch is any, and before the failure of a path's row some items may be missing.

   Switches that take out one part of the protocol, and must fail:
     NO_HOLE     row A leaves no hole of an input that it drops
     LOST_DROP   the branch writes no turn for an input that it drops
     ANY_PATH    the merge takes from whichever path has something
     BY_NUMBER   a row that fails shuts all rows before it in the table, so the other path, too
     LATE_FAIL   FAIL of a path waits until the other path has a mark
     NO_WAIT     row A passes a mark while a call is inside
     ONE_MARK    (with COMPLETION) a mark is passed that only one path has
     ABOVE_ALONE (with COMPLETION) FAIL of the branch, or of the row above it, is passed alone */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef CAPA
#define CAPA 1
#endif
#ifndef WAITS
#define WAITS 1
#endif
#define SLOTS 4
#define TURNS 8
#define HOLE 20
#define EPOCH 29
#define END 30
#define FAIL 31 /* + 0: the row above, 1: B, 2: A, 3: C */
#define NOTHING 99
#define MARK 2  /* a turn */
#define EX 7

/* edges: 0 and 1 in front of A and C, 2 and 3 behind them, 4 the sink */
byte val[5 * SLOTS], stamp[5 * SLOTS], head[5], tail[5];
byte turn[TURNS], turns_put, turns_taken;
byte epoch_at = 255;
byte in, cut; /* of the branch: the next item, and where END or FAIL comes */
bit above_fails;
bit shut[4]; /* B, A, C, M */
byte act[4];
/* ghosts */
byte fate[ITEMS]; /* 1 dropped, 10 + k: row k has failed with it */
byte next, result, old; /* calls of the first epoch in row A */

#define IX(e, t) ((e) * SLOTS + (t) % SLOTS)
#define READY(e) (stamp[IX(e, head[e])] == head[e] + 1)
#define TAG(e) (READY(e) -> val[IX(e, head[e])] : NOTHING)
#define OVER(e) (tail[e] > head[e] + 1 -> tail[e] - head[e] - 1 : 0)
#define B_MAY (!shut[0] && act[0] == 0 && in <= cut && OVER(0) + OVER(1) < WAITS)
#ifdef NO_WAIT
#define ALONE true
#else
#define ALONE (act[1] == 0)
#endif
#define A_ROOM (head[0] < head[2] + CAPA + 2)
#define A_MAY (!shut[1] && A_ROOM && act[1] != EX && READY(0) && \
               (TAG(0) >= MARKS -> ALONE : act[1] < 2))
#define C_MAY (!shut[2] && act[2] == 0 && READY(1) && tail[3] < head[3] + 2)
#define MARKS EPOCH /* what is not less is a mark */
#define OWN_FAIL(e) (TAG(e) == FAIL + (e))
#define IS_MARK(e) (TAG(e) >= MARKS && TAG(e) != NOTHING)
#define COMMON (IS_MARK(2) && IS_MARK(3))
#define HAS_TURN (turns_taken < turns_put)
#define TURN turn[turns_taken % TURNS]
/* whether the merge can take from the path whose edge is e */
#ifdef ANY_PATH
#define M_TAKES(e) (TAG(e) <= HOLE || OWN_FAIL(e))
#elif defined LATE_FAIL
#define M_TAKES(e) (HAS_TURN && TURN == (e) - 2 && READY(e) && (TAG(e) < MARKS || COMMON))
#else
#define M_TAKES(e) (HAS_TURN && TURN == (e) - 2 && READY(e))
#endif
#ifdef ANY_PATH
#define M_MARK (!M_TAKES(2) && !M_TAKES(3) && COMMON)
#else
#define M_MARK (HAS_TURN && TURN == MARK && (COMMON || OWN_FAIL(2) || OWN_FAIL(3)))
#endif
#ifdef COMPLETION /* spdl__merge_runnable: any of the looks may be old, so any of them will do */
#define M_MAY (!shut[3] && act[3] == 0 && tail[4] < head[4] + 2 && \
               (TAG(2) <= HOLE || TAG(3) <= HOLE || M_PASSES))
#ifdef ONE_MARK
#define M_PASSES (IS_MARK(2) || IS_MARK(3))
#elif defined LATE_FAIL
#define M_PASSES COMMON
#else
#define M_PASSES (COMMON || OWN_FAIL(2) || OWN_FAIL(3))
#endif
#else
#define M_MAY (!shut[3] && act[3] == 0 && tail[4] < head[4] + 2 && \
               (M_TAKES(2) || M_TAKES(3) || M_MARK))
#endif
#ifdef LATE_FAIL
#define ALONE_FAIL(v, e) false
#elif defined ABOVE_ALONE
#define ALONE_FAIL(v, e) ((v) >= FAIL && (v) != NOTHING)
#else
#define ALONE_FAIL(v, e) ((v) == FAIL + (e))
#endif

inline put_at(e, t, v) {
    assert(t < head[e] + SLOTS && stamp[IX(e, t)] != t + 1);
    val[IX(e, t)] = v;
    stamp[IX(e, t)] = t + 1
}
inline put(e, v) { put_at(e, tail[e], v); tail[e]++ }
inline put_turn(t) {
    d_step {
#ifndef COMPLETION
        assert(turns_put < turns_taken + TURNS);
        turn[turns_put % TURNS] = t;
        turns_put++
#else
        skip
#endif
    }
}
inline put_marks(v) {
    put_turn(MARK);
    d_step { put(0, v) };
    d_step { put(1, v) };
    if
    :: v != EPOCH -> shut[0] = 1
    :: else
    fi
}
/* A row of a path has failed, or it passes the failure of one above. */
inline shut_from(r) {
    d_step {
        shut[r] = 1;
        shut[0] = 1;
#ifdef BY_NUMBER
        shut[1] = 1
#endif
    }
}

proctype Worker() {
    byte v, t;
#ifdef COMPLETION
    byte first;
#endif
end_step:
    atomic {
        v = 0;
        t = 0;
#ifdef COMPLETION
        first = 0
#endif
    };
end_idle:
    if
    :: atomic { B_MAY -> act[0] = 1; v = in; in++ };
        if
        :: v == cut ->
            v = (above_fails -> FAIL : END);
            put_marks(v)
        :: v < cut && v == epoch_at -> v = EPOCH; put_marks(v)
        :: v < cut && v != epoch_at ->
            if
            :: put_turn(0); d_step { put(0, v) }
            :: put_turn(1); d_step { put(1, v) }
            :: fate[v] = 1;
#ifndef LOST_DROP
                put_turn(0);
#endif
                d_step { put(0, HOLE) }
            :: fate[v] = 11; v = FAIL + 1; put_marks(v)
            fi
        fi;
        act[0] = 0
    :: atomic { A_MAY && TAG(0) < MARKS ->
        v = TAG(0);
        t = head[0];
        head[0]++;
        act[1]++;
        assert(old == 0 || v < epoch_at || v == HOLE); /* inside: the barrier */
        old = old + (v < epoch_at) };
        if
        :: v == HOLE -> d_step { put_at(2, t, HOLE) }
        :: v != HOLE -> d_step { put_at(2, t, v) }
        :: v != HOLE -> fate[v] = 1;
#ifndef NO_HOLE
            d_step { put_at(2, t, HOLE) }
#endif
        :: v != HOLE -> fate[v] = 12; d_step { put_at(2, t, FAIL + 2) }; shut_from(1)
        fi;
        d_step { act[1]--; old = old - (v < epoch_at) }
    :: atomic { A_MAY && TAG(0) >= MARKS && act[1] == 0 -> v = TAG(0); act[1] = EX };
        d_step { put_at(2, head[0], v) };
        if
        :: v >= FAIL -> shut_from(1)
        :: v == END -> shut[1] = 1
        :: else
        fi;
        d_step { head[0]++; act[1] = 0 }
#ifdef NO_WAIT
    :: atomic { A_MAY && TAG(0) >= MARKS && act[1] > 0 -> v = TAG(0); put_at(2, head[0], v);
        head[0]++; shut[1] = v != EPOCH }
#endif
    :: atomic { C_MAY -> v = TAG(1); head[1]++; act[2] = 1 };
        if
        :: v >= HOLE -> d_step { put(3, v) };
            if
            :: v >= FAIL -> shut_from(2)
            :: v == END -> shut[2] = 1
            :: else
            fi
        :: v < HOLE -> d_step { put(3, v) }
        :: v < HOLE -> fate[v] = 1; d_step { put(3, HOLE) }
        :: v < HOLE -> fate[v] = 13; d_step { put(3, FAIL + 3) }; shut_from(2)
        fi;
        act[2] = 0
    :: atomic { M_MAY -> act[3] = 1 };
#ifdef COMPLETION
        if
        :: first = 2
        :: first = 3
        fi;
        /* spdl__merge_pick */
        v = TAG(first);
        if
        :: v <= HOLE -> t = first; goto merge_takes
        :: else -> v = TAG(5 - first)
        fi;
        if
        :: v <= HOLE -> t = 5 - first; goto merge_takes
        :: else
        fi;
        /* spdl__merge_mark: path by path */
        v = TAG(2);
        if
        :: ALONE_FAIL(v, 2) -> t = 2; goto merge_takes
        :: else -> first = v >= MARKS && v != NOTHING
        fi;
        v = TAG(3);
        if
        :: ALONE_FAIL(v, 3) -> t = 3; goto merge_takes
#ifdef ONE_MARK
        :: !ALONE_FAIL(v, 3) && (first || (v >= MARKS && v != NOTHING)) -> t = 5
#else
        :: !ALONE_FAIL(v, 3) && first && v >= MARKS && v != NOTHING -> t = 5
#endif
        :: else -> act[3] = 0; goto end_step
        fi;
merge_takes:
        atomic {
            if
            :: t == 5 ->
                v = (IS_MARK(3) -> TAG(3) : TAG(2));
                head[2] = head[2] + IS_MARK(2);
                head[3] = head[3] + IS_MARK(3)
            :: else -> v = TAG(t); head[t]++
            fi;
            t = 0
        };
#else
        atomic {
            if
            :: M_TAKES(2) -> v = TAG(2); head[2]++
            :: M_TAKES(3) -> v = TAG(3); head[3]++
            :: M_MARK && OWN_FAIL(2) -> v = TAG(2); head[2]++
            :: M_MARK && OWN_FAIL(3) -> v = TAG(3); head[3]++
            :: M_MARK && !OWN_FAIL(2) && !OWN_FAIL(3) ->
                v = (IS_MARK(2) -> TAG(2) : TAG(3));
                head[2]++;
                head[3]++
            fi
        };
#endif
        d_step {
            if
            :: v != HOLE -> put(4, v)
            :: else
            fi;
            turns_taken++;
            if
            :: v >= END -> shut[3] = 1 /* not EPOCH */
            :: else
            fi
        };
        act[3] = 0
    fi;
    goto end_step
}

#ifdef COMPLETION
byte got[ITEMS]; /* of the consumer */

/* every item from `from` up to here was got or dropped */
inline all_there(from, to) {
    v = from;
    do
    :: v >= to -> break
    :: else -> assert(v == epoch_at || got[v] == 1 || fate[v] == 1); v++
    od
}
#endif

inline skip_dropped() {
    do
    :: next < cut && fate[next] == 1 -> next++
    :: else -> break
    od
}

proctype Consumer() {
    byte v;
#ifdef COMPLETION
    byte t;
#endif
end_takes:
    do
#ifdef COMPLETION
    :: atomic { READY(4) -> v = TAG(4); head[4]++;
        if
        :: v < HOLE ->
            assert(got[v] == 0 && fate[v] == 0 && (v < epoch_at || epoch_at == 255 || next));
            assert(!(v < epoch_at && next));
            got[v] = 1;
            v = 0
        :: v == EPOCH -> assert(!next); next = 1; all_there(0, epoch_at); v = 0
        :: v == END -> result = END; assert(!above_fails); all_there(0, cut); break
        :: v == FAIL -> result = FAIL; assert(above_fails); all_there(0, cut); break
        :: v == FAIL + 1 -> /* of the branch: all before it is there */
            result = v;
            v = 0;
            do
            :: v == cut || fate[v] == 11 -> break
            :: else -> assert(v == epoch_at || got[v] == 1 || fate[v] == 1); v++
            od;
            assert(v < cut);
            break
        :: v > FAIL + 1 -> /* of a path */
            result = v;
            t = 0;
            do
            :: t == cut || fate[t] == v - FAIL + 10 -> break
            :: else -> t++
            od;
            assert(t < cut);
            break
        fi }
    od;
#else
    :: atomic { READY(4) -> v = TAG(4);
        skip_dropped();
        if
        :: v < HOLE -> assert(v == next); next++; head[4]++
        :: v == EPOCH -> assert(next == epoch_at); next++; head[4]++
        :: v == END -> assert(!above_fails && next == cut); break
        :: v == FAIL -> assert(above_fails && next == cut); break
        :: v > FAIL -> assert(next < cut && fate[next] == v - FAIL + 10); break
        fi;
        v = 0 }
    od;
    result = v
#endif
}

init {
    atomic {
        if
        :: cut = ITEMS
        :: above_fails = 1; cut = ITEMS
        fi;
        if
        :: epoch_at = 1
        :: true
        fi;
        run Worker();
        run Worker();
        run Consumer()
    };
    timeout;
    assert(result != 0)
}
