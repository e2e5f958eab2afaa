//! One parallel region of many phases: what a whole model computes for a token, without returning to the caller
//! between its matrices.
//!
//! A phase is a number of tasks that may run at once; the next begins when all of them are done. Each thread has a run
//! of neighbouring tasks to take first, so that what a task asks for in advance is what the thread comes to next, and
//! then takes those of others. Nobody waits for a thread that has not come: one that wakes late runs through the
//! finished phases and joins the current one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::pool::{Pool, PoolError};

/// Turns of a waiting thread before it lets others run.
const SPINS: u32 = 4000;

/// A counter on a cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Alone(AtomicUsize);

/// The most runs that the tasks of a phase are cut into.
const MOST_RUNS: usize = 8;

/// Raised when a thread leaves a phase by a panic, so that nobody waits for its task.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Release);
        }
    }
}

/// Calls `work` for each phase, an index into `tasks`, and each number below that phase's entry: the phase, the task,
/// and a number below [`Pool::threads`] that no other running call has. All calls of a phase have returned, and what
/// they wrote is visible, before the first of the next begins.
///
/// # Errors
/// [`PoolError::Panicked`] when a call panicked; later phases then did not run.
pub fn run_phases(
    pool: &Pool,
    tasks: &[usize],
    work: &(dyn Fn(usize, usize, usize) + Sync),
) -> Result<(), PoolError> {
    let runs = pool.threads().min(MOST_RUNS);
    let next: Vec<Alone> = (0..tasks.len() * runs).map(|_| Alone::default()).collect();
    let done: Vec<Alone> = tasks.iter().map(|_| Alone::default()).collect();
    let failed = AtomicBool::new(false);
    pool.run(pool.threads(), &|place| {
        let _alarm = Alarm(&failed);
        for (phase, (&count, Alone(done))) in tasks.iter().zip(&done).enumerate() {
            let mut finished = 0;
            for run in (0..runs).map(|other| (place + other) % runs) {
                let Alone(next) = &next[phase * runs + run];
                let (first, last) = (count * run / runs, count * (run + 1) / runs);
                while first + next.load(Ordering::Relaxed) < last {
                    let task = first + next.fetch_add(1, Ordering::Relaxed);
                    if task >= last {
                        break;
                    }
                    work(phase, task, place);
                    finished += 1;
                }
            }
            if finished > 0 {
                done.fetch_add(finished, Ordering::AcqRel);
            }
            let mut turns = 0u32;
            while done.load(Ordering::Acquire) < count {
                if failed.load(Ordering::Acquire) {
                    return;
                }
                turns = turns.saturating_add(1);
                if turns < SPINS {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_sees_all_of_the_one_before() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            let tasks: Vec<usize> = (0..200).map(|phase| phase * 7 % 5).collect();
            let sums: Vec<AtomicUsize> = tasks.iter().map(|_| AtomicUsize::new(0)).collect();
            run_phases(&pool, &tasks, &|phase, task, place| {
                assert!(task < tasks[phase] && place < threads);
                for before in 0..phase {
                    assert_eq!(sums[before].load(Ordering::Relaxed), tasks[before]);
                }
                sums[phase].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(sums.iter().zip(&tasks).all(|(sum, count)| sum.load(Ordering::Relaxed) == *count));
        }
    }

    #[test]
    fn a_panic_ends_the_region_and_hangs_nobody() {
        let pool = Pool::new(3).unwrap();
        let last = AtomicUsize::new(0);
        let error = run_phases(&pool, &[8, 8, 8], &|phase, task, _| {
            last.fetch_max(phase, Ordering::Relaxed);
            assert!((phase, task) != (1, 3), "broken");
        })
        .unwrap_err();
        assert!(matches!(error, PoolError::Panicked { .. }));
        assert_eq!(last.load(Ordering::Relaxed), 1);
        run_phases(&pool, &[4], &|_, _, _| {}).unwrap();
    }
}
