//! `scan`, `ls` and queries.

use std::fs;
use std::path::Path;

use mlx_bun::checkpoint::source::ModelSource;
use mlx_bun::registry::select::select_model;
use mlx_bun::registry::{Filter, Model, QueryError, Registry, Tier};

use super::support::{Cache, weights};

const LLAMA: &str = r#"{"model_type":"llama","num_hidden_layers":2,"hidden_size":8,"vocab_size":32}"#;

fn scanned(cache: &Cache) -> Registry {
    let mut registry = Registry::open(&cache.environment()).unwrap();
    registry.scan().unwrap();
    registry
}

fn names(registry: &Registry, filter: &Filter) -> Vec<String> {
    registry.models(filter).unwrap().into_iter().map(|model| model.repo_id).collect()
}

fn only(registry: &Registry) -> Model {
    let mut models = registry.models(&Filter { all_revisions: true, ..Filter::default() }).unwrap();
    assert_eq!(models.len(), 1, "{models:?}");
    models.remove(0)
}

fn three_models() -> Cache {
    let cache = Cache::new();
    cache.model("org--Big-Llama", "c1", LLAMA, 300);
    cache.model("org--small-llama", "c1", LLAMA, 100);
    cache.model("other--qwen", "c1", r#"{"model_type":"qwen3"}"#, 200);
    cache
}

#[test]
fn models_are_listed_smallest_first() {
    let cache = three_models();
    let registry = scanned(&cache);
    assert_eq!(names(&registry, &Filter::default()), ["org/small-llama", "other/qwen", "org/Big-Llama"]);
    let query = |text: &str| Filter { query: Some(text.to_owned()), ..Filter::default() };
    assert_eq!(names(&registry, &query("LLAMA")), ["org/small-llama", "org/Big-Llama"]);
    assert_eq!(names(&registry, &query("qwen3")), ["other/qwen"]);
    assert!(names(&registry, &query("%")).is_empty());
    let small = Filter { max_bytes: Some(1000), ..Filter::default() };
    assert_eq!(names(&registry, &small), ["org/small-llama", "other/qwen"]);
}

#[test]
fn a_query_means_one_repository() {
    let cache = three_models();
    cache.model("org--big-llama-assistant", "c1", r#"{"model_type":"llama_assistant"}"#, 10);
    let registry = scanned(&cache);
    let resolve = |query: &str| registry.resolve(query).unwrap();
    assert_eq!(resolve("small").unwrap().repo_id, "org/small-llama");
    // A drafter is never meant.
    assert_eq!(resolve("big").unwrap().repo_id, "org/Big-Llama");
    let error = resolve("llama").unwrap_err();
    assert_eq!(error.to_string(), "`llama` is ambiguous: org/Big-Llama, org/small-llama");
    assert!(matches!(resolve("mamba").unwrap_err(), QueryError::NoMatch { .. }));
}

#[test]
fn a_whole_name_wins_over_longer_ones() {
    let cache = three_models();
    cache.model("other--qwen-4bit", "c1", r#"{"model_type":"qwen3"}"#, 10);
    let registry = scanned(&cache);
    assert_eq!(registry.resolve("OTHER/QWEN").unwrap().unwrap().repo_id, "other/qwen");
    assert!(registry.resolve("qwen").unwrap().is_err());
}

#[test]
fn revisions_are_one_model_that_main_names() {
    let cache = Cache::new();
    cache.model("a--b", "c1", LLAMA, 10);
    cache.model("a--b", "c2", LLAMA, 20);
    cache.named("a--b", "main", "c1");
    let mut registry = scanned(&cache);
    assert_eq!(registry.resolve("a/b").unwrap().unwrap().revision.as_deref(), Some("c1"));
    assert_eq!(names(&registry, &Filter { all_revisions: true, ..Filter::default() }).len(), 2);
    // The ref moves and nothing else changes.
    cache.named("a--b", "main", "c2");
    let report = registry.scan().unwrap();
    assert_eq!((report.models, report.read), (2, 0));
    assert_eq!(registry.resolve("a/b").unwrap().unwrap().revision.as_deref(), Some("c2"));
}

#[test]
fn a_scan_reads_what_changed_and_forgets_what_went() {
    let cache = three_models();
    let mut registry = scanned(&cache);
    let again = registry.scan().unwrap();
    assert_eq!((again.models, again.read, again.removed), (3, 0, 0));
    cache.model("org--small-llama", "c1", LLAMA, 5000);
    fs::remove_dir_all(cache.root().join("models--other--qwen")).unwrap();
    // Even before a scan, what is gone is not listed.
    assert_eq!(names(&registry, &Filter::default()).len(), 2);
    let report = registry.scan().unwrap();
    assert_eq!((report.models, report.read, report.removed), (2, 1, 1));
    assert_eq!(names(&registry, &Filter::default()), ["org/Big-Llama", "org/small-llama"]);
}

#[test]
fn facts_come_from_config_headers_and_readme() {
    let cache = Cache::new();
    let folder = "models--a--b/snapshots/c1";
    cache.write(
        &format!("{folder}/config.json"),
        r#"{"model_type":"gemma4","quantization":{"bits":4,"group_size":64},"audio_config":{},
            "vision_config":{"model_type":"gemma4_vision"},
            "text_config":{"num_hidden_layers":7,"hidden_size":16,"vocab_size":99}}"#,
    );
    let path = cache.root().join(folder);
    weights(&path.join("model.safetensors"), &[("x.experts.w", 10), ("y", 5)]);
    weights(&path.join("optiq_vision.safetensors"), &[("audio_tower.layer", 3)]);
    cache.write(&format!("{folder}/README.md"), "---\nlicense: other\nlicense_name: gemma\n---\n");
    cache.write(&format!("{folder}/chat_template.jinja"), "{{ tool_call }}");
    cache.write(&format!("{folder}/kv_config.json"), "{}");
    let model = only(&scanned(&cache));
    assert_eq!((model.num_layers, model.hidden_size, model.vocab_size), (Some(7), Some(16), Some(99)));
    assert_eq!((model.quant_bits, model.quant_group_size), (Some(4), Some(64)));
    assert_eq!(model.quant_mode.as_deref(), Some("affine"));
    assert_eq!((model.experts_bytes, model.param_count), (40, Some(15)));
    assert_eq!(model.size_bytes, fs::metadata(path.join("model.safetensors")).unwrap().len());
    assert_eq!(model.sidecar_bytes, fs::metadata(path.join("optiq_vision.safetensors")).unwrap().len());
    assert!(
        model.sees() && model.hears() && model.has_tool_template && model.has_kv_config && model.complete
    );
    assert_eq!(model.license.as_deref(), Some("gemma"));
}

#[test]
fn a_broken_link_hides_nothing() {
    let cache = three_models();
    cache.link("models--org--small-llama/snapshots/c1/tokenizer.json", "../../blobs/gone");
    let registry = scanned(&cache);
    assert_eq!(names(&registry, &Filter::default()).len(), 3);
    let model = registry.resolve("small").unwrap().unwrap();
    assert!(!model.complete);
    // Files that are never read do not count.
    cache.link("models--other--qwen/snapshots/c1/.gitattributes", "../../blobs/gone");
    assert!(scanned(&cache).resolve("qwen").unwrap().unwrap().complete);
}

/// case H2: what a download or a lost blob left is listed as incomplete.
#[test]
fn unfinished_downloads_are_listed() {
    let cache = three_models();
    cache.write("models--a--cut/snapshots/c1/config.json", LLAMA);
    cache.write("models--a--cut/blobs/b1.incomplete", "half");
    cache.write("models--a--dangling/snapshots/c1/config.json", LLAMA);
    cache.link("models--a--dangling/snapshots/c1/model.safetensors", "../../blobs/gone");
    cache.link("models--a--nothing/snapshots/c1/config.json", "../../blobs/gone");
    // Weights of another kind are no model of ours, and none on its way.
    cache.write("models--a--torch/snapshots/c1/config.json", LLAMA);
    cache.write("models--a--torch/snapshots/c1/pytorch_model.bin", "x");
    let registry = scanned(&cache);
    for name in ["a/cut", "a/dangling", "a/nothing"] {
        assert!(!registry.resolve(name).unwrap().unwrap().complete, "{name}");
    }
    assert_eq!(names(&registry, &Filter::default()).len(), 6);
}

#[test]
fn links_in_ones_own_folders_are_not_followed() {
    let cache = Cache::new();
    let (mine, outside) = (cache.home.path().join("mine"), cache.home.path().join("outside"));
    for folder in [mine.join("org/model"), outside.join("other")] {
        weights(&folder.join("model.safetensors"), &[("a", 1)]);
        fs::write(folder.join("config.json"), LLAMA).unwrap();
    }
    std::os::unix::fs::symlink(&outside, mine.join("link")).unwrap();
    std::os::unix::fs::symlink("..", mine.join("org/up")).unwrap();
    let mut registry = scanned(&cache);
    registry.add_folder(&mine).unwrap();
    registry.scan().unwrap();
    assert_eq!(names(&registry, &Filter::default()), ["org/model"]);
}

#[test]
fn broken_models_are_skipped_and_said() {
    let cache = three_models();
    cache.write("models--a--bad/snapshots/c1/config.json", "{");
    cache.write("models--a--bad/snapshots/c1/model.safetensors", "x");
    cache.write("models--a--empty/snapshots/c1/config.json", "{}");
    cache.model("a--cut", "c1", LLAMA, 100);
    let file = cache.root().join("models--a--cut/snapshots/c1/model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 10]).unwrap();
    let mut registry = Registry::open(&cache.environment()).unwrap();
    let report = registry.scan().unwrap();
    assert_eq!((report.models, report.skipped.len()), (4, 2));
    assert!(report.skipped[0].1.contains("not valid JSON"), "{report:?}");
    assert!(!registry.resolve("a/cut").unwrap().unwrap().complete);
}

#[test]
fn links_out_of_the_cache_are_not_followed() {
    let cache = Cache::new();
    let outside = cache.home.path().join("outside");
    weights(&outside.join("model.safetensors"), &[("a", 1)]);
    fs::write(outside.join("config.json"), LLAMA).unwrap();
    cache.write("models--a--b/snapshots/c1/config.json", LLAMA);
    let target = outside.join("model.safetensors");
    cache.link("models--a--b/snapshots/c1/model.safetensors", target.to_str().unwrap());
    cache.link("models--c--d/snapshots/c1", outside.to_str().unwrap());
    assert!(names(&scanned(&cache), &Filter::default()).is_empty());
}

#[test]
fn folders_of_ones_own_are_remembered() {
    let cache = Cache::new();
    let mine = cache.home.path().join("mine");
    weights(&mine.join("org/model/model.safetensors"), &[("a", 1)]);
    fs::write(mine.join("org/model/config.json"), LLAMA).unwrap();
    let mut registry = scanned(&cache);
    registry.add_folder(&mine).unwrap();
    registry.scan().unwrap();
    drop(registry);
    let mut registry = scanned(&cache);
    let model = only(&registry);
    assert_eq!((model.repo_id.as_str(), model.tier), ("org/model", Tier::Generic));
    assert!(registry.remove_folder(&mine).unwrap() && !registry.remove_folder(&mine).unwrap());
    assert_eq!(registry.scan().unwrap().removed, 1);
    assert!(registry.add_folder(Path::new("/nonexistent/x")).is_err());
}

#[test]
fn a_broken_or_older_database_is_made_anew() {
    let cache = three_models();
    let file = cache.home.path().join("own/registry.sqlite");
    for broken in [vec![7; 5000], b"SQLite format 3\0 and no more".to_vec(), Vec::new()] {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, broken).unwrap();
        assert_eq!(names(&scanned(&cache), &Filter::default()).len(), 3);
    }
    // Where nothing can be written, it lives in memory.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(names(&scanned(&cache), &Filter::default()).len(), 3);
}

#[test]
fn scans_at_the_same_time_agree() {
    let cache = three_models();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(names(&scanned(&cache), &Filter::default()).len(), 3));
        }
    });
}

#[test]
fn a_model_is_selected_by_path_id_query_or_nothing() {
    let cache = three_models();
    let environment = cache.environment();
    let select = |argument: Option<&str>| select_model(argument, &environment);
    let snapshot = |repo: &str| cache.root().join(format!("models--{repo}/snapshots/c1"));
    let path = snapshot("other--qwen");
    assert_eq!(select(path.to_str()).unwrap().source, ModelSource::Snapshot(path.clone()));
    assert_eq!(select(Some("qwen")).unwrap().source, ModelSource::Snapshot(path));
    assert_eq!(select(Some("small")).unwrap().repo_id.as_deref(), Some("org/small-llama"));
    assert!(
        select(Some("llama")).unwrap_err().to_string().contains("ambiguous: org/Big-Llama, org/small-llama")
    );
    assert!(select(Some("nothing-like-it")).unwrap_err().to_string().contains("is no model"));
    assert!(select(Some("org/small")).unwrap_err().to_string().contains("is not in the Hugging Face cache"));
    assert!(select(Some("no/where")).unwrap_err().to_string().contains("is not in the Hugging Face cache"));
    // Nothing named and no starter: the largest that leaves room.
    assert_eq!(select(None).unwrap().source, ModelSource::Snapshot(snapshot("org--Big-Llama")));
    let empty = Cache::new();
    let error = select_model(None, &empty.environment()).unwrap_err().to_string();
    assert!(error.contains("starter model"), "{error}");
}
