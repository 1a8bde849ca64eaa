// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/*
 * Runs the tests. In debugfs:
 *
 *   kernel-verbs/list   the names of all tests, one on each line
 *   kernel-verbs/run    write "DEVICE TEST" to run one (the write returns when it has ended), read how it ended:
 *                       "ok", "skip REASON" or "FAIL FILE:LINE REASON"
 */
#include <linux/debugfs.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "kernel-verbs.h"

static const struct test *const groups[] = {
	device_tests, cq_tests, qp_tests, traffic_tests, mr_tests, key_tests, rw_tests,
};

/* The devices there are. */
struct known {
	struct list_head list;
	struct ib_device *device;
};

static LIST_HEAD(devices);
/* Of the devices, and of the one test that runs at a time. */
static DEFINE_MUTEX(lock);

static int add_device(struct ib_device *added);
static void remove_device(struct ib_device *removed, void *data);

static struct ib_client client = {
	.name = "kernel_verbs_test",
	.add = add_device,
	.remove = remove_device,
};

static int add_device(struct ib_device *added)
{
	struct known *known = kzalloc(sizeof(*known), GFP_KERNEL);

	if (!known)
		return -ENOMEM;
	known->device = added;
	ib_set_client_data(added, &client, known);
	mutex_lock(&lock);
	list_add_tail(&known->list, &devices);
	mutex_unlock(&lock);
	return 0;
}

static void remove_device(struct ib_device *removed, void *data)
{
	struct known *known = data;

	mutex_lock(&lock);
	list_del(&known->list);
	mutex_unlock(&lock);
	kfree(known);
}

/* The test that runs, or ran last. */

struct deferred {
	struct list_head list;
	enum when when;
	void (*undo)(void *what);
	void *what;
};

struct ib_device *device;
static LIST_HEAD(deferred);
static char result[512] = "none\n";
struct completion ended;

void defer(enum when when, void (*undo)(void *what), void *what)
{
	struct deferred *entry = kmalloc(sizeof(*entry), GFP_KERNEL);

	if (!entry) {
		undo(what);
		fail("no memory");
	}
	entry->when = when;
	entry->undo = undo;
	entry->what = what;
	list_add(&entry->list, &deferred);
}

void forget(void *what)
{
	struct deferred *entry;

	list_for_each_entry(entry, &deferred, list) {
		if (entry->what == what) {
			list_del(&entry->list);
			kfree(entry);
			return;
		}
	}
	fail("nothing was deferred for this");
}

static void undo_all(void)
{
	struct deferred *entry, *next;
	enum when when;

	for (when = UNDO_QP; when <= UNDO_LAST; when++) {
		list_for_each_entry_safe(entry, next, &deferred, list) {
			if (entry->when != when)
				continue;
			list_del(&entry->list);
			entry->undo(entry->what);
			kfree(entry);
		}
	}
}

void failed_at(const char *file, int line, const char *format, ...)
{
	const char *name = strrchr(file, '/');
	va_list args;
	int length;

	length = scnprintf(result, sizeof(result), "FAIL %s:%d ", name ? name + 1 : file, line);
	va_start(args, format);
	vscnprintf(result + length, sizeof(result) - length, format, args);
	va_end(args);
}

void skipped(const char *format, ...)
{
	va_list args;

	strscpy(result, "skip ", sizeof(result));
	va_start(args, format);
	vscnprintf(result + 5, sizeof(result) - 5, format, args);
	va_end(args);
}

static int run_thread(void *arg)
{
	const struct test *test = arg;

	strscpy(result, "ok", sizeof(result));
	test->run();
	end_test();
}

static const struct test *find_test(const char *name)
{
	const struct test *test;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(groups); i++)
		for (test = groups[i]; test->name; test++)
			if (!strcmp(test->name, name))
				return test;
	return NULL;
}

static ssize_t run_write(struct file *file, const char __user *from, size_t length, loff_t *position)
{
	char line[128], *name, *rest = line;
	const struct test *test;
	struct task_struct *task;
	struct known *known;
	ssize_t ret;

	if (length >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, length))
		return -EFAULT;
	line[length] = 0;
	name = strsep(&rest, " \n");
	test = rest ? find_test(strsep(&rest, " \n")) : NULL;
	if (!test)
		return -ENOENT;
	mutex_lock(&lock);
	device = NULL;
	list_for_each_entry(known, &devices, list)
		if (!strcmp(dev_name(&known->device->dev), name))
			device = known->device;
	if (!device) {
		ret = -ENODEV;
		goto out;
	}
	init_completion(&ended);
	task = kthread_run(run_thread, (void *)test, "kernel-verbs");
	if (IS_ERR(task)) {
		ret = PTR_ERR(task);
		goto out;
	}
	wait_for_completion(&ended);
	undo_all();
	ret = length;
out:
	mutex_unlock(&lock);
	return ret;
}

static int run_show(struct seq_file *file, void *unused)
{
	mutex_lock(&lock);
	seq_printf(file, "%s\n", result);
	mutex_unlock(&lock);
	return 0;
}

static int run_open(struct inode *inode, struct file *file)
{
	return single_open(file, run_show, NULL);
}

static const struct file_operations run_operations = {
	.owner = THIS_MODULE,
	.open = run_open,
	.read = seq_read,
	.write = run_write,
	.llseek = seq_lseek,
	.release = single_release,
};

static int list_show(struct seq_file *file, void *unused)
{
	const struct test *test;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(groups); i++)
		for (test = groups[i]; test->name; test++)
			seq_printf(file, "%s\n", test->name);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(list);

static struct dentry *directory;

static int __init kernel_verbs_init(void)
{
	int ret = ib_register_client(&client);

	if (ret)
		return ret;
	directory = debugfs_create_dir("kernel-verbs", NULL);
	debugfs_create_file("run", 0600, directory, NULL, &run_operations);
	debugfs_create_file("list", 0400, directory, NULL, &list_fops);
	return 0;
}

static void __exit kernel_verbs_exit(void)
{
	debugfs_remove_recursive(directory);
	ib_unregister_client(&client);
}

module_init(kernel_verbs_init);
module_exit(kernel_verbs_exit);
MODULE_DESCRIPTION("Tests of the RDMA verbs for users in the kernel");
MODULE_AUTHOR("virtio-rdma developers");
MODULE_LICENSE("GPL");
