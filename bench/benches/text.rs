//! Time of what happens to text: tokenizing, detokenizing, rendering a chat template, matching stop strings.
//!
//! `cargo bench -p mlx-bun-bench --bench text`

#![allow(
    clippy::unwrap_used,
    missing_docs,
    reason = "a program for the terminal; criterion's macros have no docs"
)]

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use mlx_bun::generate::stop::StopMatcher;
use mlx_bun::tokenizer::Tokenizer;
use mlx_bun::tokenizer::chat_template::{ChatTemplate, RenderRequest};
use serde_json::{Value, json};

const SENTENCE: &str = "The quick brown fox jumps over the lazy dog; 12 größere Füchse, 東京と大阪, don't. ";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures").join(name)
}

fn tokenizers(criterion: &mut Criterion) {
    let text = SENTENCE.repeat(50);
    for kind in ["byte-level", "byte-fallback", "metaspace"] {
        let tokenizer = Tokenizer::from_dir(&fixture("tokenizers").join(kind)).unwrap();
        let ids = tokenizer.encode(&text, false).unwrap();
        let mut group = criterion.benchmark_group(format!("tokenizer/{kind}"));
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function("encode", |bencher| bencher.iter(|| tokenizer.encode(black_box(&text), false)));
        group.throughput(Throughput::Elements(ids.len() as u64));
        group.bench_function("detokenize", |bencher| {
            bencher.iter_batched(
                || tokenizer.detokenizer(),
                |mut detokenizer| {
                    let mut bytes = 0;
                    for id in &ids {
                        detokenizer.add_token(*id);
                        bytes += detokenizer.take_segment().len();
                    }
                    bytes + detokenizer.finish().len()
                },
                BatchSize::SmallInput,
            );
        });
        group.finish();
    }
}

fn templates(criterion: &mut Criterion) {
    let turns = |count: usize| -> Value {
        (0..count)
            .map(
                |turn| json!({"role": if turn % 2 == 0 { "user" } else { "assistant" }, "content": SENTENCE}),
            )
            .collect()
    };
    let mut group = criterion.benchmark_group("template");
    let source = fs::read_to_string(fixture("chat_templates/templates/chatml.jinja")).unwrap();
    group.bench_function("compile", |bencher| {
        bencher.iter(|| ChatTemplate::new("chatml", black_box(&source)).unwrap());
    });
    let template = ChatTemplate::new("chatml", &source).unwrap();
    for count in [1, 21] {
        let messages = turns(count);
        let request = RenderRequest { add_generation_prompt: true, ..RenderRequest::new(&messages) };
        group.bench_function(format!("render/{count}-messages"), |bencher| {
            bencher.iter(|| template.render(black_box(&request)).unwrap());
        });
    }
    group.finish();
}

fn stops(criterion: &mut Criterion) {
    let pieces: Vec<&str> = SENTENCE.split_inclusive(' ').collect();
    let mut group = criterion.benchmark_group("stop-matcher");
    group.throughput(Throughput::Elements(pieces.len() as u64));
    for stops in [vec![], vec!["\n\nUser:"], vec!["fox jumped", "the lazy cat", "###", "大阪府"]] {
        let fresh = StopMatcher::new(stops.clone()).unwrap();
        group.bench_function(format!("{}-strings", stops.len()), |bencher| {
            bencher.iter_batched(
                || fresh.clone(),
                |mut matcher| {
                    let text: usize = pieces.iter().map(|piece| matcher.push(piece).text.len()).sum();
                    text + matcher.finish().text.len()
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, tokenizers, templates, stops);
criterion_main!(benches);
