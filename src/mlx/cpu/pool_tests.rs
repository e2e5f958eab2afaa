use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn counts(pool: &Pool, tasks: usize) -> Vec<u32> {
    let seen: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
    pool.run(tasks, &|task| {
        seen[task].fetch_add(1, Ordering::Relaxed);
    })
    .unwrap();
    seen.into_iter().map(AtomicU32::into_inner).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_task_runs_exactly_once(threads in 1usize..9, jobs in prop::collection::vec(0usize..300, 1..20)) {
        let pool = Pool::new(threads).unwrap();
        for tasks in jobs {
            prop_assert_eq!(counts(&pool, tasks), vec![1; tasks]);
        }
    }

    #[test]
    fn chunks_cover_the_slice_once(threads in 1usize..5, length in 0usize..200, chunk in 0usize..40) {
        let pool = Pool::new(threads).unwrap();
        let mut data = vec![0usize; length];
        pool.run_chunks_mut(&mut data, chunk, &|index, piece| {
            for (offset, value) in piece.iter_mut().enumerate() {
                *value += index * chunk.max(1) + offset + 1;
            }
        }).unwrap();
        prop_assert_eq!(data, (1..=length).collect::<Vec<_>>());
    }
}

#[test]
fn many_short_jobs_on_more_threads_than_cores() {
    let pool = Pool::new(16).unwrap();
    let total = AtomicUsize::new(0);
    for job in 0..3000 {
        pool.run(job % 40, &|task| {
            total.fetch_add(task + 1, Ordering::Relaxed);
        })
        .unwrap();
    }
    let expected: usize = (0..3000).map(|job| (job % 40) * (job % 40 + 1) / 2).sum();
    assert_eq!(total.into_inner(), expected);
}

#[test]
fn workers_wake_again_after_they_slept() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..5 {
        std::thread::sleep(SPIN * 20);
        assert_eq!(counts(&pool, 64), vec![1; 64]);
    }
}

#[test]
fn other_threads_do_take_part() {
    let pool = Pool::new(2).unwrap();
    let names = Mutex::new(HashSet::new());
    for _ in 0..20 {
        pool.run(8, &|_| {
            std::thread::sleep(Duration::from_millis(1));
            lock(&names).insert(std::thread::current().id());
        })
        .unwrap();
    }
    assert_eq!(lock(&names).len(), 2);
}

#[test]
fn a_panic_in_a_task_is_an_error_and_the_pool_goes_on() {
    let pool = Pool::new(4).unwrap();
    for round in 0..50 {
        let failed = pool.run(100, &|task| assert!(task != 37, "task {task} of round {round}"));
        assert_eq!(failed, Err(PoolError::Panicked { message: format!("task 37 of round {round}") }));
        assert_eq!(counts(&pool, 10), vec![1; 10]);
    }
    let alone = Pool::new(1).unwrap().run(1, &|_| panic!("alone"));
    assert_eq!(alone.unwrap_err().to_string(), "a kernel failed: alone");
}

#[test]
fn a_panic_in_every_task_is_one_error() {
    let pool = Pool::new(4).unwrap();
    assert!(matches!(pool.run(64, &|_| panic!("all")), Err(PoolError::Panicked { .. })));
}

#[test]
fn a_job_inside_a_task_runs_on_that_thread() {
    let pool = Pool::new(4).unwrap();
    let total = AtomicUsize::new(0);
    pool.run(10, &|_| {
        let outer = std::thread::current().id();
        pool.run(10, &|_| {
            assert_eq!(std::thread::current().id(), outer);
            total.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    })
    .unwrap();
    assert_eq!(total.into_inner(), 100);
}

#[test]
fn callers_on_several_threads_take_turns() {
    let pool = Pool::new(3).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert_eq!(counts(&pool, 17), vec![1; 17]);
                }
            });
        }
    });
}

#[test]
#[cfg(target_os = "linux")]
fn idle_workers_use_no_processor_time() {
    let pool = Pool::new(2).unwrap();
    counts(&pool, 64);
    std::thread::sleep(SPIN * 50);
    // A parked worker has said so.
    assert!(pool.shared.parked.iter().all(|parked| parked.0.load(Ordering::SeqCst)));
}

#[test]
fn thread_counts_out_of_range_are_refused() {
    for asked in [0, MAX_THREADS + 1, usize::MAX] {
        assert_eq!(Pool::new(asked).unwrap_err(), PoolError::ThreadCount { asked });
    }
    assert_eq!(Pool::new(MAX_THREADS).unwrap().threads(), MAX_THREADS);
}

#[test]
fn the_default_is_between_one_and_the_logical_processors() {
    let logical = std::thread::available_parallelism().unwrap().get();
    assert!((1..=logical.min(MAX_THREADS)).contains(&default_threads()));
}

#[test]
fn cpu_lists_parse() {
    assert_eq!(parse_cpu_list(" 0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
    assert_eq!(parse_cpu_list("3"), Some(vec![3]));
    for malformed in ["", "a", "1-", "0-99999999999", "1,,2"] {
        assert_eq!(parse_cpu_list(malformed), None, "{malformed:?}");
    }
}
