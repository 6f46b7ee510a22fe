// needs: golang-go
// flags: env GOCACHE="$PWD/$output-cache" GO111MODULE=off go build -o $output.new $source
//
// Channels of Go, in a process of their own: reads a line for each run, answers with one.
// The loops are those of flow.h; for the line see far_run in bench_ring.c.
package main

import (
    "bufio"
    "fmt"
    "os"
    "sort"
    "sync"
    "sync/atomic"
    "syscall"
    "time"
)

const shift = 48
const end = ^uint64(0)

const (
    stream = iota
    pingpong
    working
    wake
    idle
)

type spec struct {
    which, kind, pinned, producers, consumers, capacity int
    items                                               uint64
    produceWork, consumeWork                            uint64
    idleMs                                              int
}

type done struct {
    started, ended                          time.Time
    pushed, popped, pushedSum, poppedSum    uint64
    inOrder                                 bool
    samples                                 []float64
}

type shared struct {
    spec
    ready    sync.WaitGroup
    left     int64
    taken    uint64
    deadline time.Time
    began    time.Time
    results  chan done
}

func cpuNs() float64 {
    var use syscall.Rusage
    syscall.Getrusage(syscall.RUSAGE_SELF, &use)
    return float64(use.Utime.Nano() + use.Stime.Nano())
}

func work(seed uint64, turns uint64) uint64 {
    seed |= 1
    for i := uint64(0); i < turns; i++ {
        seed ^= seed << 13
        seed ^= seed >> 7
        seed ^= seed << 17
    }
    return seed
}

// All go at once, as from a barrier.
func (s *shared) gate() time.Time {
    s.ready.Done()
    s.ready.Wait()
    return time.Now()
}

func (s *shared) produce(index int, to chan uint64) {
    base := uint64(index) << shift
    d := done{inOrder: true, started: s.gate()}
    switch s.kind {
    case working:
        for time.Now().Before(s.deadline) {
            number := atomic.AddUint64(&s.taken, 1)
            if number > s.items || work(number, s.produceWork) == 0 {
                break
            }
            d.pushed++
            d.pushedSum += number
            to <- base + number
        }
    case wake:
        for ; d.pushed < s.items; d.pushed++ {
            time.Sleep(300 * time.Microsecond)
            to <- uint64(time.Since(s.began)) + 1
        }
    default:
        each := s.items / uint64(s.producers)
        i := uint64(0)
        for i < each && time.Now().Before(s.deadline) {
            stop := i + 256
            if stop > each || s.producers+s.consumers == 2 {
                stop = each
            }
            for i < stop {
                i++
                to <- base + i
            }
        }
        d.pushed = i
        d.pushedSum = i * (i + 1) / 2
    }
    if atomic.AddInt64(&s.left, -1) == 0 {
        for i := 0; i < s.consumers; i++ {
            to <- end
        }
    }
    d.ended = time.Now()
    s.results <- d
}

func (s *shared) consume(from chan uint64) {
    var last [8]uint64
    d := done{inOrder: true, started: s.gate()}
    for item := <-from; item != end; item = <-from {
        d.popped++
        if s.kind == wake {
            d.samples = append(d.samples, float64(uint64(time.Since(s.began))+1-item))
            continue
        }
        number := item & (1<<shift - 1)
        before := &last[item>>shift%8]
        d.inOrder = d.inOrder && number > *before
        *before = number
        d.poppedSum += number
        if s.consumeWork > 0 && work(item, s.consumeWork) == 0 {
            d.inOrder = false
        }
    }
    d.ended = time.Now()
    s.results <- d
}

func (s *shared) ping(to, from chan uint64) {
    d := done{inOrder: true, started: s.gate()}
    for i := uint64(1); i <= s.items; i++ {
        to <- i
        d.inOrder = <-from == i && d.inOrder
    }
    to <- end
    d.ended = time.Now()
    d.pushed = s.items
    s.results <- d
}

func (s *shared) pong(from, to chan uint64) {
    d := done{inOrder: true, started: s.gate()}
    for item := <-from; item != end; item = <-from {
        to <- item
        d.popped++
    }
    d.ended = time.Now()
    s.results <- d
}

// Starts the goroutines of a run, but for the producers of an idle one.
func (s *shared) start(there chan uint64) {
    threads := s.producers + s.consumers
    if s.kind == idle {
        threads = s.consumers
    }
    s.ready.Add(threads)
    s.results = make(chan done, threads)
    if s.kind == pingpong {
        back := make(chan uint64, s.capacity)
        go s.pong(there, back)
        go s.ping(there, back)
        return
    }
    for i := 0; i < s.consumers; i++ {
        go s.consume(there)
    }
    for i := 0; i < s.producers && s.kind != idle; i++ {
        go s.produce(i, there)
    }
}

// Items, ns, cpu ns, p50 ns and whether all was well.
func run(of spec) string {
    s := &shared{spec: of, left: int64(of.producers)}
    s.began = time.Now()
    s.deadline = s.began.Add(240 * time.Millisecond)
    there := make(chan uint64, s.capacity)
    cpu := -cpuNs()
    s.start(there)
    if s.kind == idle {
        return s.idle(there)
    }
    all := done{inOrder: true}
    for i := 0; i < s.producers+s.consumers; i++ {
        all.add(<-s.results)
    }
    cpu += cpuNs()
    sort.Float64s(all.samples)
    p50 := 0.0
    if len(all.samples) > 0 {
        p50 = all.samples[len(all.samples)/2]
    }
    ok := 0
    same := all.pushed == all.popped && all.pushedSum == all.poppedSum
    if all.inOrder && same {
        ok = 1
    }
    return fmt.Sprintf("%d %d %f %f %d", all.pushed, all.ended.Sub(all.started).Nanoseconds(), cpu,
        p50, ok)
}

func (s *shared) idle(there chan uint64) string {
    time.Sleep(50 * time.Millisecond)
    start := time.Now()
    cpu := -cpuNs()
    time.Sleep(time.Duration(s.idleMs) * time.Millisecond)
    cpu += cpuNs()
    ns := time.Since(start).Nanoseconds()
    for i := 0; i < s.consumers; i++ {
        there <- end
    }
    for i := 0; i < s.consumers; i++ {
        <-s.results
    }
    return fmt.Sprintf("0 %d %f 0 1", ns, cpu)
}

func (d *done) add(other done) {
    if d.started.IsZero() || other.started.Before(d.started) {
        d.started = other.started
    }
    if other.ended.After(d.ended) {
        d.ended = other.ended
    }
    d.pushed += other.pushed
    d.popped += other.popped
    d.pushedSum += other.pushedSum
    d.poppedSum += other.poppedSum
    d.inOrder = d.inOrder && other.inOrder
    d.samples = append(d.samples, other.samples...)
}

func main() {
    lines := bufio.NewScanner(os.Stdin)
    for lines.Scan() {
        var s spec
        fmt.Sscan(lines.Text(), &s.which, &s.kind, &s.pinned, &s.producers, &s.consumers,
            &s.capacity, &s.items, &s.produceWork, &s.consumeWork, &s.idleMs)
        fmt.Println(run(s))
    }
}
